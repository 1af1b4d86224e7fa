"""The node's CDI documents (Container Device Interface 0.6.0): of each card, what a container needs of it, under a name
that stays while the kernel counts cards anew. For the node's process, which writes them, and for whatever names them.

Source: SPEC.md of cncf-tags/container-device-interface.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planning.devices.cards import Card, Vendor

VERSION = "0.6.0"
DOMAIN = "berth.dev"
# A document with one name that is none, or one device without anything in it, is dropped whole by container runtimes.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """What every container with a GPU of NVIDIA's needs beside the GPU's own nodes. `nodes`: device nodes of the host
    (nvidiactl, nvidia-uvm and so on); `libraries`: (host path, container path) of the driver's own libraries and
    programs, which must be those of the running driver. `hook`: the host's nvidia-cdi-hook or nvidia-ctk, with which a
    container's loader finds the libraries wherever its distribution looks for them; '' if there is none.
    """

    nodes: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()
    hook: str = ""


def name(vendor: Vendor, card: str) -> str:
    """The fully qualified name of a card: `berth.dev/nvidia=GPU-…`."""
    return f"{kind(vendor)}={card}"


def kind(vendor: Vendor) -> str:
    """The kind of a vendor's document."""
    return f"{DOMAIN}/{vendor}"


def documents(cards: Iterable[Card], files: DriverFiles = DriverFiles()) -> dict[str, dict[str, Any]]:
    """The documents by kind, of cards that have a device node and an id that can be a name. The same cards, in whatever
    order, make the same.
    """
    by_id = {card.id: card for card in cards}
    found: dict[str, dict[str, Any]] = {}
    for card in sorted(by_id.values(), key=lambda each: (each.vendor, each.id)):
        nodes = device_nodes(card, by_id)
        if not nodes or not _NAME.fullmatch(card.id):
            continue
        document = found.setdefault(kind(card.vendor), _document(card.vendor, files))
        edits = {"deviceNodes": [{"path": path, "hostPath": host, "permissions": "rw"} for host, path in nodes]}
        document["devices"].append({"name": card.id, "containerEdits": edits})
    return found


def device_nodes(card: Card, cards: Mapping[str, Card]) -> list[tuple[str, str]]:
    """(host path, container path) of the card's own device nodes, and of the GPU whose instance it is. A symbolic link
    is none for a container runtime: of Tenstorrent's cards it is the node that the link leads to now.
    """
    whole = cards.get(card.parent) if card.parent else None
    paths = [*(whole.nodes if whole is not None else ()), *card.nodes]
    if card.vendor == "tenstorrent":
        paths = [f"{path.partition('/by-id/')[0]}/{card.index}" if "/by-id/" in path else path for path in paths]
    return [(path, inside(path)) for path in dict.fromkeys(paths)]


def inside(path: str) -> str:
    """Where a device node of the host, or of a simulated machine's folder, is in a container."""
    return f"/dev/{path.rpartition('/dev/')[2]}"


def _document(vendor: Vendor, files: DriverFiles) -> dict[str, Any]:
    document: dict[str, Any] = {"cdiVersion": VERSION, "kind": kind(vendor), "devices": []}
    if vendor == "nvidia":
        edits: dict[str, Any] = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
        if files.nodes:
            edits["deviceNodes"] = [{"path": inside(path), "hostPath": path} for path in sorted(files.nodes)]
        if files.libraries:
            edits["mounts"] = _mounts(files.libraries)
        if files.hook and (
            folders := sorted({path.rpartition("/")[0] for _, path in files.libraries if ".so" in path})
        ):
            edits["hooks"] = [_ldcache(files.hook, folders)]
        document["containerEdits"] = edits
    return document


def _mounts(libraries: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    options = ["ro", "nosuid", "nodev", "bind"]
    return [{"hostPath": host, "containerPath": path, "options": options} for host, path in sorted(libraries)]


def _ldcache(hook: str, folders: Sequence[str]) -> dict[str, Any]:
    """As `nvidia-ctk cdi generate` writes it."""
    program = hook.rpartition("/")[2]
    command = [program] if program == "nvidia-cdi-hook" else [program, "hook"]
    args = [*command, "update-ldcache", *(each for folder in folders for each in ("--folder", folder))]
    return {"hookName": "createContainer", "path": hook, "args": args}
