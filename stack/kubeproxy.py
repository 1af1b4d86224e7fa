"""kube-proxy on the real node: Services answer on their cluster IPs, for this machine and for its pods.

For `make_plan`, which leaves it out where `obstacle` knows why. Its nftables tables have one name on every machine, so
the stack's are told from others' by a comment. It finds no program but nft: at its start it would remove what iptables
and IPVS hold for other kube-proxies, and all of IPVS.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from stack.control_plane import SERVICE_RANGE
from stack.options import UpOptions
from stack.paths import SYSTEM_PATH, Layout, NodeFolders, write_atomic
from stack.pki import Authority, Identity, write_kubeconfig
from stack.process import Probe, ProcessSpec

KUBE_PROXY = "kube-proxy"
PORTS = ("kube-proxy-health", "kube-proxy-metrics")
_FAMILIES = ("ip", "ip6")
_TABLE = "kube-proxy"  # compiled into it
_LEAST_NFT, _LEAST_KERNEL = (1, 0, 1), (5, 13)  # with older ones kube-proxy ends at once
_RANGE = ipaddress.IPv4Network(SERVICE_RANGE)


def obstacle(layout: Layout) -> str:
    """Why this machine cannot have Services of this stack, the second half of a sentence; empty if it can."""
    nft = _find()
    if not nft:
        return "there is no program nft (Debian's package nftables)"
    for what, version, least in (
        ("nft", _run(nft, "--version").stdout, _LEAST_NFT),
        ("this kernel", os.uname().release, _LEAST_KERNEL),
    ):
        if _numbers(version) < least:
            return f"kube-proxy needs {'.'.join(map(str, least))} or newer of {what}, which says {version.strip()!r}"
    listed = _run(nft, "list", "chains")
    if listed.returncode != 0:
        told = listed.stderr.strip().splitlines() or ["it says nothing"]
        return f"nft does not work here: {told[0]}"
    if re.search(r"^\s*chain KUBE-SERVICES \{", listed.stdout, re.MULTILINE):
        return "another kube-proxy works here through iptables (its chain is KUBE-SERVICES)"
    if _tables(nft) and _owner(nft) != _mark(layout):
        whose = f"another stack's ({_owner(nft)})" if _owner(nft).startswith("berth ") else "not this stack's"
        return (
            f"there is an nftables table {_TABLE} already, {whose}; if nobody needs it, "
            f"`nft delete table {_tables(nft)[0]} {_TABLE}` removes it"
        )
    taken = in_range(Path("/etc/resolv.conf"), Path("/proc/thread-self/net/route"))
    if taken:
        return f"this machine reaches {taken} in its own network, and {SERVICE_RANGE} would be Services' addresses"
    return ""


def spec(
    layout: Layout, program: Path, ports: Mapping[str, int], authority: Authority, options: UpOptions, after: str
) -> ProcessSpec:
    """kube-proxy in nftables mode, with all the files it reads. `after`: the process that makes its Node."""
    folders = NodeFolders(layout)
    nft = _find()
    only_nft = folders.root / "kube-proxy-path"
    only_nft.mkdir(exist_ok=True)
    if not (only_nft / "nft").is_symlink():
        (only_nft / "nft").symlink_to(nft)
    kubeconfig = layout.kubeconfig(KUBE_PROXY)
    client = authority.client(KUBE_PROXY, Identity("system:kube-proxy"))  # bound to system:node-proxier by Kubernetes
    write_kubeconfig(kubeconfig, f"https://127.0.0.1:{ports['kube-apiserver']}", authority.pair, client, KUBE_PROXY)
    health = f"127.0.0.1:{ports['kube-proxy-health']}"
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": options.node_name,
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "healthzBindAddress": health,
        "metricsBindAddress": f"127.0.0.1:{ports['kube-proxy-metrics']}",
        # Pods share a bridge. An answer from one to another would not pass the rules that turn its address back, where
        # the kernel does not hand bridged packets to them; so it is sent to the machine.
        "nftables": {"masqueradeAll": True},
        # Zeros leave the kernel's own settings as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    file, text = folders.root / "kube-proxy.yaml", yaml.safe_dump(config, sort_keys=False)
    if not file.is_file() or file.read_text() != text:  # it watches the file, and ends when that is written
        write_atomic(file, text)
    return ProcessSpec(
        KUBE_PROXY,
        (str(program), f"--config={file}"),
        env={"PATH": str(only_nft)},
        after=(after,),
        # It is healthy before it has written its first rules.
        ready=(
            Probe("http", f"http://{health}/healthz"),
            Probe("exec", argv=(nft, "list", "map", "ip", _TABLE, "service-ips")),
        ),
        port=ports["kube-proxy-health"],
        stop_timeout=3,
        # kube-proxy takes a table that is there, and leaves its comment as it is.
        before=(nft, "add", "table", "ip", _TABLE, f'{{ comment "{_mark(layout)}"; }}'),
    )


def clean(layout: Layout) -> None:
    """Removes the rules of this stack's kube-proxy, and nobody else's. Harmless where there are none."""
    nft = _find()
    if nft and _owner(nft) == _mark(layout):
        _run(nft, "; ".join(f"delete table {family} {_TABLE}" for family in _tables(nft)))


def in_range(resolvers: Path, routes: Path) -> str:
    """What this machine already reaches at addresses of Services, by its resolv.conf and its kernel's table of routes
    (`/proc/net/route`); empty if it is nothing.
    """
    for address in _nameservers(resolvers):
        if address in _RANGE:
            return f"the name server {address}"
    for network in _networks(routes):
        if network.subnet_of(_RANGE):
            return str(network)
    return ""


def _nameservers(file: Path) -> Iterator[ipaddress.IPv4Address]:
    for words in _lines(file):
        if words[0] == "nameserver" and len(words) > 1:
            try:
                yield ipaddress.IPv4Address(words[1])
            except ValueError:
                continue  # of IPv6, which the range is not


def _networks(file: Path) -> Iterator[ipaddress.IPv4Network]:
    """Destination and mask are the second and the eighth word, hexadecimal in the order of the machine's bytes."""
    for words in list(_lines(file))[1:]:
        address, mask = (bytes.fromhex(words[place])[::-1] for place in (1, 7))
        yield ipaddress.IPv4Network((address, ipaddress.IPv4Address(mask).exploded))


def _lines(file: Path) -> Iterable[list[str]]:
    try:
        return [line.split() for line in file.read_text().splitlines() if line.strip()]
    except OSError:
        return []


def _mark(layout: Layout) -> str:
    return f"berth {NodeFolders(layout).tag}"


def _owner(nft: str) -> str:
    """The comment of the table, which is kept for both families by that of the first; empty without one."""
    listed = _run(nft, "--terse", "list", "table", "ip", _TABLE)
    found = re.search(r'^\tcomment "(.*)"$', listed.stdout, re.MULTILINE)
    return found[1] if found else ""


def _tables(nft: str) -> list[str]:
    """The families in which there is a table."""
    listed = _run(nft, "list", "tables").stdout.splitlines()
    return [family for family in _FAMILIES if f"table {family} {_TABLE}" in listed]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.search(r"\d+(\.\d+)+", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _find() -> str:
    return shutil.which("nft", path=SYSTEM_PATH) or ""


def _run(nft: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([nft, *arguments], capture_output=True, text=True, check=False)
