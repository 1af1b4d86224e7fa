"""`berth simulate`: what a strategy would make of a trace, as fast as the pure planner goes."""
