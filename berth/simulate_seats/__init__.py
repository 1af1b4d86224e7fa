"""`berth simulate seats`: what the rules for who is active make of requests, in simulated time."""
