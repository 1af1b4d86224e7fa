"""Simulated GPUs for seats: memory that is held and copied, a driver that parks it, model servers that use it."""
