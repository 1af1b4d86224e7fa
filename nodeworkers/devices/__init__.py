"""The allocation core: from what providers see to what the kubelet is offered, and who holds what."""
