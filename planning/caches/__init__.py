"""Kernel caches: what may be mounted where, what will hit, what is kept. For whoever pulls, checks and serves them."""
