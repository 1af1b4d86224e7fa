"""Which of the seats on a group of GPUs has the slot, when it changes, whether the node's memory bears it, and what is
said of it: between workflow and node, to people, and to the Services that lead to seats.
"""
