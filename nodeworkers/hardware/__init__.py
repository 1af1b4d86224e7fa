"""Which GPUs a node has: one provider for each vendor's own tools, one of simulated GPUs, one of all that are there."""
