"""Front end A of the node's devices: the kubelet's device plugin interface, v1beta1."""
