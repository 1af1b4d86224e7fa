"""What can be chosen about a stack: existing services to use, the real node, and knobs for tests.

For whoever calls `Stack.up`; the command line fills the same fields from its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ExistingCluster:
    """A cluster to use instead of starting one. Empty fields mean what kubectl takes them to mean."""

    kubeconfig: Path | None = None
    context: str | None = None


@dataclass(frozen=True)
class ExistingTemporal:
    """A Temporal to use instead of starting one. TLS is on if any of its files or a key is given, or `tls` is set.

    `api_key_env` names the environment variable that holds the API key; the key itself is written nowhere.
    """

    address: str
    namespace: str = "default"
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str | None = None
    api_key_env: str | None = None

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls or any((self.tls_ca, self.tls_cert, self.tls_server_name, self.api_key_env))


@dataclass(frozen=True)
class UpOptions:
    """Options of `Stack.up`.

    `keep_history`: etcd forgets no revision. `event_ttl`: a Go duration. `node_monitor_grace`: a Go duration after
    which a silent node counts as lost; empty for Kubernetes' own. `etcd_fsync`: off saves time and loses data only if
    the whole machine fails. `tools`: explicit paths of programs by name. `end_with_caller`: the stack ends when the
    process that called `up` is gone, however it went, so that a killed test run leaves nothing behind.
    """

    cluster: ExistingCluster | None = None
    temporal: ExistingTemporal | None = None
    real_node: bool = False
    node_name: str = "node-1"
    kwok: bool = True
    keep_history: bool = False
    event_ttl: str = "1h"
    node_monitor_grace: str = ""
    node_lease_seconds: int = 40
    etcd_fsync: bool = True
    temporal_ui: bool = True
    temporal_dynamic_config: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Path] = field(default_factory=dict)
    start_timeout: float = 120.0
    end_with_caller: bool = False

    @property
    def has_real_node(self) -> bool:
        """Whether a kubelet is started: one joins the stack's own cluster only."""
        return self.real_node and self.cluster is None
