"""The allocation core's front end for DRA: publishes the node's devices and prepares claims for the kubelet."""
