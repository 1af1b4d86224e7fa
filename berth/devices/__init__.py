"""What people see of nodes' devices: `berth devices` over the cluster, `berth node inspect` of one node."""
