"""The ways to park a seat's server, a file each."""
