"""`berth recommend`: what to ask for, from what a model's runs did with what they were given."""
