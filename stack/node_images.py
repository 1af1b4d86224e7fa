"""Makes the container images of the real node out of Debian's static busybox: no registry is reachable from it.

For `realnode.py`, and for tests that want an image of their own (`docker_archive`).
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stack.paths import write_atomic

BUSYBOX = "local/busybox:1"
PAUSE = "local/pause:1"
_APPLETS = (
    "sh cat ls env sleep echo mkdir rm cp mv ln httpd wget nc touch grep sed awk id mount umount true false date kill "
    "ps test printf head tail seq wc dd df du find hostname ip ping stat sync sha256sum tar vi"
)


@dataclass(frozen=True)
class Entry:
    """One file of an image: content and mode, or the target of a symbolic link, or neither for a folder."""

    content: bytes | None = None
    link: str | None = None
    mode: int = 0o755


def _layer(files: Mapping[str, Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, entry in files.items():
            info = tarfile.TarInfo(name)
            info.mode = entry.mode
            if entry.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, entry.link
                archive.addfile(info)
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(entry.content)
                archive.addfile(info, io.BytesIO(entry.content))
    return buffer.getvalue()


def docker_archive(name: str, files: Mapping[str, Entry], entrypoint: Sequence[str]) -> bytes:
    """An image of one layer in the docker-archive format, as `ctr images import` takes it."""
    layer = _layer(files)
    digest = hashlib.sha256(layer).hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    config = json.dumps(
        {
            "architecture": machine,
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [],
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    parts = {
        config_name: config,
        f"{digest}/layer.tar": layer,
        "manifest.json": json.dumps(manifest).encode(),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for part, content in parts.items():
            info = tarfile.TarInfo(part)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_images(folder: Path, busybox: Path) -> list[Path]:
    """Writes busybox.tar and pause.tar, and returns both."""
    program = Entry(busybox.read_bytes())
    files = {"bin": Entry(), "tmp": Entry(mode=0o1777), "bin/busybox": program}
    files |= {f"bin/{applet}": Entry(link="busybox", mode=0o777) for applet in _APPLETS.split()}
    pause = {"bin": Entry(), "bin/busybox": program}
    images = {
        folder / "busybox.tar": docker_archive(BUSYBOX, files, ["/bin/sh"]),
        folder / "pause.tar": docker_archive(PAUSE, pause, ["/bin/busybox", "sleep", "2147483647"]),
    }
    for path, content in images.items():
        write_atomic(path, content)
    return list(images)
