"""berth's control plane for the comparison: etcd and kube-apiserver alone, with the flags that the peer's harness
gives its own (controller-runtime's envtest, and the harness' limits on requests); the embedded stack tunes more.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stack import Probe, StackError
from stack.pki import IDENTITIES, Authority, signing_key, write_kubeconfig
from stack.ports import choose
from stack.proc import die_with_parent

READY_WITHIN = 60.0


@dataclass(frozen=True, slots=True)
class ControlPlane:
    kubeconfig: Path
    processes: Mapping[str, int]  # process ids by name


@contextmanager
def control_plane(folder: Path, programs: Mapping[str, Path]) -> Iterator[ControlPlane]:
    """Both processes in `folder` while the context lasts; `programs`: etcd and kube-apiserver."""
    folder.mkdir(parents=True)
    ports = choose(("etcd", "etcd-peer", "kube-apiserver"), {})
    store = f"http://127.0.0.1:{ports['etcd']}"
    authority = Authority(folder / "pki", "kueue-benchmark")
    serving, admin = (
        authority.server("kube-apiserver", ("127.0.0.1", "localhost")),
        authority.client("admin", IDENTITIES["admin"]),
    )
    tokens = signing_key(folder / "pki")
    server = f"https://127.0.0.1:{ports['kube-apiserver']}"
    kubeconfig = folder / "admin.yaml"
    write_kubeconfig(kubeconfig, server, authority.pair, admin, "admin")
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        running["etcd"] = _start(
            folder,
            [
                str(programs["etcd"]),
                f"--listen-peer-urls=http://127.0.0.1:{ports['etcd-peer']}",
                f"--listen-client-urls={store}",
                f"--advertise-client-urls={store}",
                f"--data-dir={folder / 'etcd'}",
                "--unsafe-no-fsync=true",
            ],
            Probe("http", f"{store}/health"),
        )
        running["kube-apiserver"] = _start(
            folder,
            [
                str(programs["kube-apiserver"]),
                "--advertise-address=127.0.0.1",
                "--allow-privileged=true",
                "--authorization-mode=RBAC",
                "--bind-address=127.0.0.1",
                f"--cert-dir={folder / 'pki'}",
                f"--client-ca-file={authority.pair.cert}",
                "--disable-admission-plugins=ServiceAccount",
                f"--etcd-servers={store}",
                "--max-mutating-requests-inflight=2500",
                "--max-requests-inflight=5000",
                f"--secure-port={ports['kube-apiserver']}",
                f"--service-account-issuer={server}/",
                f"--service-account-key-file={tokens.cert}",
                f"--service-account-signing-key-file={tokens.key}",
                "--service-cluster-ip-range=10.0.0.0/24",
                f"--tls-cert-file={serving.cert}",
                f"--tls-private-key-file={serving.key}",
            ],
            Probe(
                "http", f"{server}/readyz", ca=str(authority.pair.cert), cert=str(admin.cert), key=str(admin.key)
            ),
        )  # fmt: skip
        yield ControlPlane(kubeconfig, {name: process.pid for name, process in running.items()})
    finally:
        for process in reversed(running.values()):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(folder: Path, command: Sequence[str], ready: Probe) -> subprocess.Popen[bytes]:
    name = Path(command[0]).name
    log_file = folder / f"{name}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, preexec_fn=die_with_parent)
    deadline = time.monotonic() + READY_WITHIN
    while not asyncio.run(ready.passes()):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-10:])
            raise StackError(f"{name} did not become ready. The end of its log:\n{tail}")
        time.sleep(0.1)
    return process
