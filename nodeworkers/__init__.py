"""The node's process: what answers the kubelet, and the hardware work that workflows ask for."""
