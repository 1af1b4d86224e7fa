"""A real node on this machine: containerd and a kubelet beside the embedded control plane. Needs root, and Debian.

For `Stack.up` with `real_node`, and for tests, which skip with `unavailable()` as the reason. runc and the CNI plugins
are Debian's; containerd and the kubelet are built. Everything the node mounts or starts is ended by `down`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stack import kubeproxy
from stack.errors import StackError
from stack.node_images import PAUSE, write_images
from stack.options import UpOptions
from stack.paths import SYSTEM_PATH, Layout, NodeFolders, is_locked, write_atomic
from stack.pki import Authority, Identity, write_kubeconfig
from stack.process import Probe, ProcessSpec
from stack.progress import Progress

KUBELET, CONTAINERD = "kubelet", "containerd"
# Of every kubelet, whatever its --root-dir: the name is compiled in.
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
TOOLS = ("kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr", "crictl")
PORTS = ("kubelet", "kubelet-health", *kubeproxy.PORTS)

_PACKAGES = {
    "runc": ("runc",),
    "containernetworking-plugins": ("/usr/lib/cni/bridge", "/usr/lib/cni/host-local", "/usr/lib/cni/loopback"),
    "iptables": ("iptables",),
    "conntrack": ("conntrack",),
    "busybox-static": ("/bin/busybox",),
}
_FOR_SERVICES = {"nftables": ("nft",)}


def _missing(packages: Mapping[str, tuple[str, ...]]) -> list[str]:
    def here(program: str) -> bool:
        return (
            os.path.exists(program) if program.startswith("/") else shutil.which(program, path=SYSTEM_PATH) is not None
        )

    return [package for package, programs in packages.items() if not all(here(program) for program in programs)]


def unavailable() -> str:
    """Why this machine cannot be a real node; empty if it can (packages may still have to be installed)."""
    if sys.platform != "linux":
        return "a real node needs Linux"
    if os.geteuid() != 0:
        return "a real node needs root"
    missing = _missing(_PACKAGES)
    if missing and shutil.which("apt-get") is None:
        return f"a real node needs {', '.join(missing)}, and there is no apt-get to install them"
    if not node_address():
        return "a real node needs a network address other than loopback"
    return ""


def node_address() -> str:
    """The address that this machine would speak from; empty if it has none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def kubelet_root(data: Path) -> Path:
    """What the kubelet of the stack in a data folder has as --root-dir."""
    return NodeFolders(Layout.of(data)).kubelet


def cdi_folder(data: Path) -> Path:
    """Where the containerd of the stack in a data folder looks for CDI specifications."""
    return NodeFolders(Layout.of(data)).cdi


def prepare(options: UpOptions, progress: Progress) -> None:
    """Installs the Debian packages that are missing. Raises StackError where a real node is wanted and cannot be."""
    if not options.real_node:
        return
    reason = unavailable()
    if reason:
        raise StackError(
            f"`--real-node` is not possible here: {reason}.", "Leave it out: kwok simulates nodes anywhere."
        )
    missing = _missing(_PACKAGES)
    if missing:
        complaint = _install(missing, progress)
        if complaint:  # a fresh machine has no package lists
            subprocess.run(["apt-get", "update"], capture_output=True, check=False)
            complaint = _install(missing, progress)
        if complaint:
            raise StackError(
                f"The packages {', '.join(missing)} could not be installed:\n{complaint}", "Install them by hand."
            )
    wished = _missing(_FOR_SERVICES)
    if wished and shutil.which("apt-get"):
        _install(wished, progress)  # without them the plan leaves Services out, and says so


def _install(packages: Sequence[str], progress: Progress) -> str:
    """What apt-get complains of; empty where they are installed."""
    progress.update("packages", f"installing {', '.join(packages)}")
    result = subprocess.run(
        ["apt-get", "install", "-y", "--no-install-recommends", *packages],
        capture_output=True, text=True, check=False, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
    )  # fmt: skip
    if result.returncode != 0:
        return "\n".join(f"  {line}" for line in result.stderr.splitlines()[-6:]) or "  it says nothing"
    progress.finish("packages", f"installed {', '.join(packages)}")
    return ""


def specs(
    layout: Layout, programs: Mapping[str, Path], ports: Mapping[str, int], authority: Authority, options: UpOptions
) -> list[ProcessSpec]:
    """containerd and the kubelet, with all the files they read."""
    folders = NodeFolders(layout)
    if not folders.kubelet.exists():  # a new node: what the kubelet of another one remembered is not about it
        (DEVICE_PLUGINS / "kubelet_internal_checkpoint").unlink(missing_ok=True)
    for folder in (folders.root, folders.root / "cni", folders.kubelet, folders.run):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not folders.stack.is_symlink():
        folders.stack.symlink_to(layout.root)
    images = write_images(folders.root, Path("/bin/busybox"))
    config = _containerd_config(folders)
    write_atomic(folders.root / "containerd.toml", config)
    write_atomic(folders.root / "cni" / "10-berth.conflist", _cni_config(folders))
    path = f"{programs['containerd-shim-runc-v2'].parent}:{SYSTEM_PATH}"
    control = (str(programs["ctr"]), "-a", str(folders.socket), "-n", "k8s.io")
    containerd = ProcessSpec(
        CONTAINERD,
        (str(programs["containerd"]), "-c", str(folders.root / "containerd.toml")),
        env={"PATH": path},
        # Ready means that the images are there as well; importing them again changes nothing.
        ready=(
            Probe("file", str(folders.socket)),
            *(Probe("exec", argv=(*control, "images", "import", "--local", str(image))) for image in images),
        ),
        stop_timeout=5,
    )
    address = node_address()
    serving = authority.server(f"kubelet-{options.node_name}", (address, "127.0.0.1", options.node_name, "localhost"))
    client = authority.client(
        f"node-{options.node_name}", Identity(f"system:node:{options.node_name}", ("system:nodes",))
    )
    kubeconfig = layout.kubeconfig(f"node-{options.node_name}")
    write_kubeconfig(kubeconfig, f"https://127.0.0.1:{ports['kube-apiserver']}", authority.pair, client, "kubelet")
    kubelet_config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "port": ports["kubelet"],
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": ports["kubelet-health"],
        "tlsCertFile": str(serving.cert),
        "tlsPrivateKeyFile": str(serving.key),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority.pair.cert)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{folders.socket}",
        "cgroupDriver": "cgroupfs",
        # The machine may be a container or an old kernel: no cgroup v2, no cgroups of the kubelet's own.
        "failCgroupV1": False,
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "podLogsDir": str(folders.root / "podlogs"),
        "evictionHard": {"imagefs.available": "1%", "nodefs.available": "1%", "nodefs.inodesFree": "1%"},
        "imageGCHighThresholdPercent": 100,  # an image that was collected could not be pulled again
    }
    write_atomic(folders.root / "kubelet.yaml", yaml.safe_dump(kubelet_config, sort_keys=False))
    kubelet = ProcessSpec(
        KUBELET,
        (
            str(programs["kubelet"]),
            f"--config={folders.root / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={folders.kubelet}",
            f"--hostname-override={options.node_name}",
            f"--node-ip={address}",
        ),
        env={"PATH": SYSTEM_PATH},
        after=(CONTAINERD, "kube-apiserver"),
        ready=(
            Probe("http", f"http://127.0.0.1:{ports['kubelet-health']}/healthz"),
            Probe("exec", argv=_node_ready(layout, programs, options)),
        ),
        port=ports["kubelet"],
        stop_timeout=5,
    )
    return [containerd, kubelet]


def _node_ready(layout: Layout, programs: Mapping[str, Path], options: UpOptions) -> tuple[str, ...]:
    return (
        str(programs["kubectl"]), "--kubeconfig", str(layout.kubeconfig("admin")), "wait", "--for=condition=Ready",
        f"node/{options.node_name}", "--timeout=1s",
    )  # fmt: skip


def _containerd_config(folders: NodeFolders) -> str:
    return f"""version = 3
root = "{folders.root}/containerd"
state = "{folders.run}/containerd"
[grpc]
address = "{folders.socket}"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"
[plugins."io.containerd.cri.v1.runtime"]
# Without CAP_SYS_RESOURCE, as in many containers, a score cannot be lowered.
restrict_oom_score_adj = true
cdi_spec_dirs = ["{folders.cdi}"]
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["/usr/lib/cni"]
conf_dir = "{folders.root}/cni"
"""


def _cni_config(folders: NodeFolders) -> str:
    return f"""{{
  "cniVersion": "1.0.0", "name": "{folders.bridge}",
  "plugins": [{{
    "type": "bridge", "bridge": "{folders.bridge}", "isGateway": true,
    "ipam": {{
      "type": "host-local", "dataDir": "{folders.run}/ipam",
      "ranges": [[{{"subnet": "10.201.0.0/16"}}]], "routes": [{{"dst": "0.0.0.0/0"}}]
    }}
  }}]
}}
"""


def end_pods(layout: Layout, programs: Mapping[str, Path]) -> None:
    """Stops every pod through containerd, as a kubelet would for a reboot; they start again with the next `up`."""
    folders = NodeFolders(layout)
    if not folders.socket.exists() or "crictl" not in programs:
        return
    crictl = [str(programs["crictl"]), "--runtime-endpoint", f"unix://{folders.socket}", "--timeout", "20s"]
    listed = subprocess.run([*crictl, "pods", "-q"], capture_output=True, text=True, check=False)
    for pod in listed.stdout.split():
        subprocess.run([*crictl, "stopp", pod], capture_output=True, check=False)


def clean(layout: Layout) -> None:
    """Ends the shims that are left, unmounts what is mounted, removes the bridge and the rules of Services. Harmless
    where nothing is left.
    """
    folders = NodeFolders(layout)
    if os.geteuid() != 0 or not folders.run.exists():
        return
    _end_shims(folders)
    kubeproxy.clean(layout)
    for place in sorted(_mounts(folders), key=len, reverse=True):
        _unmount(place)
    _remove_networks(folders)
    if shutil.which("ip", path=SYSTEM_PATH):
        subprocess.run(["ip", "link", "delete", folders.bridge], capture_output=True, check=False)
    shutil.rmtree(folders.run, ignore_errors=True)


def clean_abandoned(layout: Layout) -> None:
    """Cleans up after stacks of other folders that were killed. Their bridges have the addresses of this one's, so that
    answers to pods would go astray; and their rules of Services would be in the way.
    """
    for link in NodeFolders(layout).run.parent.glob("berth-*/stack"):
        with contextlib.suppress(FileNotFoundError):  # somebody else cleans it up as well
            other = Layout(link.readlink())
            alive = is_locked(other.supervisor_lock) or is_locked(other.lock)
            if other != layout and not alive:
                clean(other)


def _end_shims(folders: NodeFolders) -> None:
    """Shims outlive containerd on purpose. Ours carry our socket as an argument; containers are below them."""
    doomed: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if arguments[0].endswith(b"containerd-shim-runc-v2") and str(folders.socket).encode() in arguments:
                doomed.append(int(entry.name))
    for pid in [child for shim in doomed for child in _children(shim)] + doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(os.path.exists(f"/proc/{pid}/exe") for pid in doomed):
        time.sleep(0.02)


def _remove_networks(folders: NodeFolders) -> None:
    """Network namespaces of pods whose sandbox went without saying goodbye. CNI keeps a record of each, by our name."""
    records = Path("/var/lib/cni/results")
    for record in records.glob(f"{folders.bridge}-*"):
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(record.read_text())
            namespace = str(known.get("netns", ""))
            if namespace.startswith(("/var/run/netns/cni-", "/run/netns/cni-")):
                _unmount(namespace)
                Path(namespace).unlink(missing_ok=True)
            for other in records.glob(f"cni-loopback-{known['containerId']}-*"):
                other.unlink()
        record.unlink(missing_ok=True)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in file.read_text().split()]
    return found


def _mounts(folders: NodeFolders) -> list[str]:
    roots = (f"{folders.root}/", f"{folders.run}/")
    result = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = line.split()[4].encode().decode("unicode_escape")  # spaces are written as \040
        if place.startswith(roots):
            result.append(place)
    return result


def _unmount(place: str) -> None:
    detach = 2  # MNT_DETACH: also where something still looks into it
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(place), detach)
