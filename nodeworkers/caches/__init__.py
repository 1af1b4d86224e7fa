"""What a node does about kernel caches when it is told to: prepare one, or let go of it."""
