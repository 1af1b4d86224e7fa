"""The node process: what it stores, mounts and answers the kubelet from its own ledger."""
