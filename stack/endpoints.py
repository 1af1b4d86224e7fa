"""Where everything is: addresses, kubeconfigs and ports, as `up` chose them and wrote them into stack.json.

For whoever works with a stack: the command line, the application's processes, tests and benchmarks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from stack.errors import StackError

APPLICATION_PORTS = (
    "controller-health", "controller-metrics", "controller-webhook", "worker-health", "worker-metrics", "node-health",
    "node-metrics",
)  # fmt: skip
"""Ports set aside for the application's own processes."""


@dataclass(frozen=True)
class Endpoints:
    """The addresses of one stack. Empty text or None means that the stack has no such thing.

    `embedded_cluster` and `embedded_temporal` say whether they are the stack's own or existing ones.
    """

    data: Path
    temporal_address: str
    temporal_namespace: str
    temporal_ui: str | None
    temporal_tls: bool
    temporal_tls_ca: Path | None
    temporal_tls_cert: Path | None
    temporal_tls_key: Path | None
    temporal_tls_server_name: str | None
    temporal_api_key_env: str | None
    kubeconfigs: Mapping[str, Path]
    embedded_cluster: bool
    embedded_temporal: bool
    apiserver: str | None = None
    etcd_endpoint: str | None = None
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, Path] = field(default_factory=dict)

    def kubeconfig(self, identity: str = "admin") -> Path:
        """The kubeconfig of an identity (see `stack.pki.IDENTITIES`); an existing cluster has one for all."""
        try:
            return self.kubeconfigs[identity if self.embedded_cluster else "admin"]
        except KeyError:
            raise StackError(
                f"The stack has no identity {identity}.", f"Known: {', '.join(self.kubeconfigs)}."
            ) from None

    def temporal_environment(self) -> dict[str, str]:
        """The variables by which Temporal's own tools and SDKs find this server, whatever a person's profile file says.
        Holds no API key.
        """
        values = {
            "TEMPORAL_CONFIG_FILE": os.devnull,
            "TEMPORAL_ADDRESS": self.temporal_address,
            "TEMPORAL_NAMESPACE": self.temporal_namespace,
            "TEMPORAL_TLS_SERVER_CA_CERT_PATH": self.temporal_tls_ca,
            "TEMPORAL_TLS_CLIENT_CERT_PATH": self.temporal_tls_cert,
            "TEMPORAL_TLS_CLIENT_KEY_PATH": self.temporal_tls_key,
            "TEMPORAL_TLS_SERVER_NAME": self.temporal_tls_server_name,
            "TEMPORAL_TLS": "true" if self.temporal_tls else None,
        }
        return {name: str(value) for name, value in values.items() if value}

    def to_json(self) -> dict[str, Any]:
        """As plain values for stack.json."""

        def plain(value: Any) -> Any:
            if isinstance(value, Path):
                return str(value)
            return {key: plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value

        return {key: plain(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Endpoints:
        """From stack.json, which another version of berth may have written."""
        known = {each.name for each in fields(cls)}
        values = {name: each for name, each in value.items() if name in known}
        for name in (
            "data",
            "temporal_tls_ca",
            "temporal_tls_cert",
            "temporal_tls_key",
            "etcd_ca",
            "etcd_cert",
            "etcd_key",
        ):
            values[name] = Path(value[name]) if value.get(name) else None
        for name in ("kubeconfigs", "tools"):
            values[name] = {key: Path(path) for key, path in value.get(name, {}).items()}
        return cls(**values)
