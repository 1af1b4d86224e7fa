"""The CSI driver csi.tkm.io: kernel caches as inline volumes, served from the node's ledger alone."""
