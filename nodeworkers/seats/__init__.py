"""Seats at work: who has the slot of each group of GPUs, and how its server is parked and woken."""
