"""The Temporal part of the plan: the development server with its UI over one SQLite file, on loopback.

For `Stack.up`. The pragmas double its throughput (a write-ahead log, synced at checkpoints); a killed server loses
nothing by them, only a machine that loses power can lose the last moments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from stack.options import UpOptions
from stack.paths import Layout
from stack.process import Probe, ProcessSpec

PORTS = ("temporal", "temporal-ui", "temporal-http", "temporal-metrics")
NAMESPACE = "default"
RETENTION = "720h"
_ALONE = ("--disable-config-env", "--disable-config-file")
"""A person's own profile names other servers and keys; the embedded one is addressed without it."""

SEARCH_ATTRIBUTES = ("BerthKind", "BerthNamespace", "BerthName", "BerthNode", "BerthPhase")


def server(layout: Layout, program: Path, ports: Mapping[str, int], options: UpOptions) -> ProcessSpec:
    """The server process, ready when its frontend answers."""
    address = f"127.0.0.1:{ports['temporal']}"
    argv = [str(program), "server", "start-dev", "--ip", "127.0.0.1", "--port", str(ports["temporal"])]
    argv += ["--http-port", str(ports["temporal-http"]), "--metrics-port", str(ports["temporal-metrics"])]
    argv += ["--db-filename", str(layout.root / "temporal" / "temporal.db")]
    argv += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=normal"]
    argv += ["--log-level", "warn", "--log-format", "json"]
    if options.temporal_ui:
        argv += ["--ui-port", str(ports["temporal-ui"]), "--ui-disable-news-fetch"]
    else:
        argv.append("--headless")
    for name in SEARCH_ATTRIBUTES:
        argv += ["--search-attribute", f"{name}=Keyword"]
    for key, value in options.temporal_dynamic_config.items():
        argv += ["--dynamic-config-value", f"{key}={json.dumps(value)}"]
    health = (str(program), "operator", "cluster", "health", "--address", address, *_ALONE, "--command-timeout", "2s")
    return ProcessSpec(
        "temporal",
        tuple(argv),
        env={"TEMPORAL_VERSION_CHECK_DISABLED": "1"},
        ready=(Probe("tcp", address), Probe("exec", argv=health)),
        port=ports["temporal"],
    )


def settle_namespace(program: Path, address: str) -> list[str]:
    """The command that makes closed workflows stay for 30 days instead of the development server's one."""
    return [
        str(program), "operator", "namespace", "update", "--namespace", NAMESPACE,
        "--retention", RETENTION, "--address", address, *_ALONE,
    ]  # fmt: skip
