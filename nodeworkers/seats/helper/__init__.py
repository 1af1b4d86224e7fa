"""The process that makes a driver's calls on a group's servers: begun once, and never ended amid a call."""
