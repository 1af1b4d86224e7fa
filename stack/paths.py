"""Where the stack keeps things: berth's cache (tools, Go caches), one data folder per stack, the real node's folders.

For every other module of the stack; nothing else spells a file name that two modules share.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack.errors import StackError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where Debian's programs are, also for who has another PATH."""


def cache_root() -> Path:
    """berth's folder below the XDG cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "berth"


def default_data() -> Path:
    """The data folder that the command line uses when none is named."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "berth" / "default"


@dataclass(frozen=True)
class Layout:
    """File names inside one data folder. `root` is absolute."""

    root: Path

    @classmethod
    def of(cls, data: Path) -> Layout:
        """The layout of a data folder named by a person."""
        return cls(Path(data).expanduser().absolute())

    @property
    def state(self) -> Path:
        """What `up` decided and chose: ports, addresses, versions. Written by `up` alone."""
        return self.root / "stack.json"

    @property
    def lock(self) -> Path:
        """Held while `up` or `down` works on this folder."""
        return self.root / "lock"

    @property
    def plan(self) -> Path:
        """The processes that should run; read by the supervisor."""
        return self.root / "run" / "plan.json"

    @property
    def supervisor(self) -> Path:
        """Who the supervisor is: process id and start time. Written by the supervisor alone."""
        return self.root / "run" / "supervisor.json"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor as long as it lives."""
        return self.root / "run" / "supervisor.lock"

    @property
    def processes(self) -> Path:
        """What runs at the moment. Written by the supervisor alone."""
        return self.root / "run" / "processes.json"

    @property
    def log(self) -> Path:
        """One `<process>.log` each, and `<process>.log.1` before it."""
        return self.root / "log"

    @property
    def pki(self) -> Path:
        """Certificates and keys."""
        return self.root / "pki"

    @property
    def config(self) -> Path:
        """Configuration files that `up` writes for the programs."""
        return self.root / "config"

    def kubeconfig(self, identity: str) -> Path:
        """The kubeconfig of one identity."""
        return self.root / "kubeconfig" / f"{identity}.yaml"

    def create(self) -> None:
        """Makes the folders; only their owner can look inside, for they hold keys and secrets."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.root.chmod(0o700)
            for folder in (self.plan.parent, self.log, self.pki, self.config, self.kubeconfig("x").parent):
                folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise StackError(
                f"The data folder {self.root} cannot be used: {error.strerror}.",
                "Name another one with --data, or make it yours.",
            ) from error


RUN = Path("/run")


class NodeFolders:
    """Where the real node's things lie. Sockets have names of at most 107 bytes, so they live in a short folder in
    /run; its link `stack` tells whose it is.
    """

    def __init__(self, layout: Layout) -> None:
        self.tag = hashlib.sha256(str(layout.root).encode()).hexdigest()[:8]
        self.root = layout.root / "node"
        self.kubelet = self.root / "kubelet"
        self.run = RUN / f"berth-{self.tag}"
        self.stack = self.run / "stack"
        self.socket = self.run / "containerd.sock"
        self.cdi = self.run / "cdi"
        self.bridge = f"berth{self.tag}"


def write_atomic(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Replaces a file so that a reader sees the old or the new content and never half of it."""
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none."""
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds an exclusive lock on a file, across processes; calls `on_wait` once if another one holds it.

    The kernel drops the lock when its holder dies, so nothing is ever left locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock on this file."""
    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
