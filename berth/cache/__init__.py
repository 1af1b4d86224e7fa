"""What `berth cache` shows."""
