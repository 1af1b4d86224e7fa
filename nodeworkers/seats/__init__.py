"""Seats on the node: many model servers on one group of GPUs, of which one at a time has them."""
