"""OCI images as berth uses them: the registry client, signatures, and what a cache image looks like."""
