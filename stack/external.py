"""Existing services: takes one context out of a person's kubeconfig, and checks that what was named answers.

For `Stack.up` when it is told to use a cluster or a Temporal instead of starting one.
"""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from stack.errors import StackError
from stack.options import ExistingCluster, ExistingTemporal
from stack.paths import write_atomic

_FILE_FIELDS = ("certificate-authority", "client-certificate", "client-key", "tokenFile")


def _load(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise StackError(
            f"The kubeconfig {file} cannot be read: {error.strerror}.", "Name another one with --kubeconfig."
        ) from error
    except yaml.YAMLError as error:
        raise StackError(
            f"The kubeconfig {file} is not YAML: {error}.", "Name another one with --kubeconfig."
        ) from error
    if not isinstance(content, dict):
        raise StackError(f"The kubeconfig {file} is empty.", "Name another one with --kubeconfig.")
    for kind, inner in (("clusters", "cluster"), ("users", "user")):
        for entry in content.get(kind) or []:
            body = entry.get(inner) or {}
            for name in _FILE_FIELDS:
                if body.get(name):  # relative to the file that names them, as kubectl has it
                    body[name] = str((file.parent / Path(body[name]).expanduser()).absolute())
    return content


def _merged(files: list[Path]) -> dict[str, Any]:
    result: dict[str, Any] = {"clusters": [], "users": [], "contexts": [], "current-context": ""}
    for file in files:
        content = _load(file)
        for kind in ("clusters", "users", "contexts"):
            known = {entry["name"] for entry in result[kind]}
            result[kind] += [entry for entry in content.get(kind) or [] if entry["name"] not in known]
        result["current-context"] = result["current-context"] or content.get("current-context") or ""
    return result


def take_context(cluster: ExistingCluster, target: Path) -> str:
    """Writes the one context to `target` (owner-readable) and returns the server's address.

    Looks where kubectl looks: the named file, else KUBECONFIG, else ~/.kube/config.
    """
    if cluster.kubeconfig is not None:
        files = [cluster.kubeconfig.expanduser().absolute()]
    else:
        named = [Path(part) for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
        files = [file.absolute() for file in named if file.is_file()] or [Path.home() / ".kube" / "config"]
    merged = _merged(files)
    where = ", ".join(map(str, files))
    name = cluster.context or merged["current-context"]
    contexts = {entry["name"]: entry for entry in merged["contexts"]}
    if name not in contexts:
        raise StackError(
            f"The kubeconfig {where} has no context {name!r}." if name else f"The kubeconfig {where} has no context.",
            f"Choose one with --context: {', '.join(contexts) or 'it holds none'}.",
        )
    body = contexts[name]["context"]
    clusters = [entry for entry in merged["clusters"] if entry["name"] == body.get("cluster")]
    users = [entry for entry in merged["users"] if entry["name"] == body.get("user")]
    if not clusters:
        raise StackError(f"Context {name} in {where} names no cluster that is in it.", "Correct the kubeconfig.")
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": clusters,
        "users": users,
        "contexts": [contexts[name]],
        "current-context": name,
    }
    write_atomic(target, yaml.safe_dump(content, sort_keys=False))
    return str(clusters[0]["cluster"].get("server", ""))


def check_server(url: str, what: str) -> None:
    """Raises StackError unless something listens at a URL."""
    parts = urlsplit(url)
    _connect(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), what, url)


def _connect(host: str, port: int, what: str, shown: str) -> None:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError as error:
        raise StackError(
            f"{what} at {shown} does not answer: {error.strerror or error}.",
            "Check the address, and that a network policy or VPN lets you reach it.",
        ) from error


def check_temporal(temporal: ExistingTemporal) -> None:
    """Raises StackError unless the address answers and, with TLS, shows a certificate that is trusted."""
    host, separator, port = temporal.address.rpartition(":")
    if not separator or not port.isdigit():
        raise StackError(f"The Temporal address {temporal.address!r} is not host:port.", "Example: temporal.local:7233")
    if temporal.api_key_env and not os.environ.get(temporal.api_key_env):
        raise StackError(
            f"No Temporal API key: the environment variable {temporal.api_key_env} is not set.",
            f"Export {temporal.api_key_env} and run `berth up` again.",
        )
    for file in (temporal.tls_ca, temporal.tls_cert, temporal.tls_key):
        if file is not None and not file.is_file():
            raise StackError(f"The TLS file {file} does not exist.", "Correct the --temporal-tls-* option.")
    _connect(host, int(port), "Temporal", temporal.address)
    if not temporal.uses_tls:
        return
    try:
        context = ssl.create_default_context(cafile=str(temporal.tls_ca) if temporal.tls_ca else None)
        if temporal.tls_cert:
            context.load_cert_chain(temporal.tls_cert, temporal.tls_key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=temporal.tls_server_name or host),
        ):
            pass
    except (OSError, ssl.SSLError) as error:
        raise StackError(
            f"Temporal at {temporal.address} refuses TLS: {error}.",
            "Check --temporal-tls-ca, --temporal-tls-cert, --temporal-tls-key and --temporal-tls-server-name.",
        ) from error
