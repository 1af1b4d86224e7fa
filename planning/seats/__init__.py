"""Decisions about seats that are handed out already: whose turn it is, what fits into memory, what is said of it."""
