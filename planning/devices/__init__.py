"""Decisions about a node's devices: how healthy each is, what is offered under which name, who gets which, and how."""
