"""Which of the seats on a group of GPUs has the slot, when it changes, and whether the node's memory bears it."""
