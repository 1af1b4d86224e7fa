"""An existing cluster and Temporal, played by one listener."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from stack import ExistingCluster, ExistingTemporal, UpOptions


@dataclass(frozen=True)
class Outside:
    """A listener that plays both an API server and a Temporal, and a kubeconfig that leads to it."""

    port: int
    kubeconfig: Path

    @property
    def options(self) -> UpOptions:
        return UpOptions(
            cluster=ExistingCluster(self.kubeconfig),
            temporal=ExistingTemporal(f"127.0.0.1:{self.port}", "prod"),
            end_with_caller=True,
        )

    def with_key(self, variable: str) -> UpOptions:
        """The same, with the API key that stands in an environment variable."""
        return replace(self.options, temporal=ExistingTemporal(f"127.0.0.1:{self.port}", "prod", api_key_env=variable))
