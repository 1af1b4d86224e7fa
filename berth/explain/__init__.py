"""`berth explain`: why a workload waits, and what would help."""
