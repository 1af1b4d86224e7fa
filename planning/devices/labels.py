"""What a node's labels tell of its accelerators: for people and selectors under berth.dev, and for placement under the
names that vendors use (planning/accelerators.py reads those). The node's process says which there are to be, and the
control plane writes them: a process that could write its Node could do more to it than that.

A label that somebody else set, NVIDIA's feature discovery say, is left to him.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args

from planning.accelerators import AMD, NVIDIA, memory_label
from planning.devices.cards import Card, Sight, Vendor
from planning.devices.offering import is_resource
from planning.podspecs import mapping, mappings

DOMAIN = "berth.dev"
MIXED = "mixed"  # where the cards of a node differ
LIMIT = 63  # characters of a value, and of a key's name

_PRODUCT = {"nvidia": f"{NVIDIA}.product", "amd": f"{AMD}.product-name"}
_OURS = tuple(f"{DOMAIN}/{vendor}." for vendor in get_args(Vendor))
_KEY_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def labels(sights: Iterable[Sight], aliases: Mapping[str, str] | None = None) -> dict[str, str]:
    """All labels, from one sight of each vendor. `aliases`: resource → the one that it is
    offered as. Keys and values are such as the API server takes; what could be none is left out.

    `berth.dev/<vendor>.` count (whole cards), card.<product> (how many of that), product, memory (MiB, the least of a
    card), driver, firmware, iommu (translated, passthrough, none), numa (nodes, as 0_1), cuda, and simulated=true. With
    cards that differ product, driver, firmware and iommu are `mixed`.
    """
    found: dict[str, str] = {}
    for sight in sights:
        whole = [card for card in sight.cards if not card.parent]
        if whole:
            found |= _own(sight, whole) | _known(sight, whole, aliases or {})
    return {key: told for key, text in found.items() if _is_key(key) and (told := value(text))}


def changes(there: Mapping[str, str], wanted: Mapping[str, str], mine: Collection[str]) -> dict[str, str | None]:
    """What to write for `wanted` to hold on a node with the labels `there`, None for those to remove. `mine` are the
    keys that berth set before, as `owned` tells: all others outside berth.dev are somebody else's, whatever they say.
    """
    written: dict[str, str | None] = {
        key: text
        for key, text in sorted(wanted.items())
        if there.get(key) != text and (key not in there or _is_ours(key, mine))
    }
    gone = sorted(key for key in there if key not in wanted and _is_ours(key, mine))
    return written | dict.fromkeys(gone, None)


def owned(node: Mapping[str, Any], manager: str) -> frozenset[str]:
    """The labels of a Node, as the API server has it, that `manager` wrote and nobody has changed since. The API server
    remembers it (metadata.managedFields), so berth need not.
    """
    entries = mappings(mapping(node.get("metadata")).get("managedFields"))
    fields = (mapping(each.get("fieldsV1")) for each in entries if each.get("manager") == manager)
    labels = (mapping(mapping(each.get("f:metadata")).get("f:labels")) for each in fields)
    return frozenset(str(key).removeprefix("f:") for each in labels for key in each if key != ".")


def admitted(asked: Mapping[Any, Any]) -> dict[str, str]:
    """Of the labels that a node asks for those that tell of accelerators: its process may be in wrong hands, and other
    labels decide which pods come to a node.
    """
    return {key: text for key, text in asked.items() if _tells(key) and isinstance(text, str) and value(text) == text}


def value(text: str) -> str:
    """The same as a label's value: at most 63 of [A-Za-z0-9._-], beginning and ending with a letter or a digit."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:LIMIT].rstrip("-._")


def _own(sight: Sight, cards: list[Card]) -> dict[str, str]:
    told = {
        "count": str(len(cards)),
        "product": _one(card.product for card in cards),
        "memory": _least(cards),
        "driver": _one(card.driver for card in cards) or sight.host.get("driver", ""),
        "firmware": _one(card.firmware for card in cards),
        "iommu": _one(sight.host.get(f"iommu/{card.id}", "") for card in cards),
        "numa": "_".join(str(numa) for numa in sorted({card.numa for card in cards if card.numa is not None})),
        "cuda": sight.host.get("cuda", ""),
        "simulated": "true" if sight.simulated else "",
    }
    counts = Counter(value(card.product) for card in cards)
    told |= {f"card.{product}": str(count) for product, count in counts.items() if product}
    return {f"{DOMAIN}/{sight.vendor}.{key}": text for key, text in told.items()}


def _known(sight: Sight, whole: list[Card], aliases: Mapping[str, str]) -> dict[str, str]:
    """Where placement looks: the model where all cards are of one, and of each resource the memory of a device."""
    found = {}
    models = {card.product for card in whole}
    if sight.vendor in _PRODUCT and len(models) == 1:
        found[_PRODUCT[sight.vendor]] = models.pop()
    if sight.vendor == "nvidia":
        found[memory_label(NVIDIA)] = _least(whole)  # also of GPUs that are offered as seats alone
    offered: dict[str, list[Card]] = {}
    for card in sight.cards:
        resource = aliases.get(card.resource, card.resource)
        if is_resource(resource):
            offered.setdefault(resource, []).append(card)
    return found | {memory_label(resource): _least(cards) for resource, cards in offered.items()}


def _one(texts: Iterable[str]) -> str:
    """What all of them say that say anything."""
    said = {text for text in texts if text}
    return MIXED if len(said) > 1 else next(iter(said), "")


def _least(cards: Iterable[Card]) -> str:
    """The memory of the card with the least, in MiB; '' where one does not tell."""
    least = min((card.memory_mib for card in cards), default=0)
    return str(least) if least > 0 else ""


def _is_ours(key: str, mine: Collection[str]) -> bool:
    return key.startswith(_OURS) or key in mine


def _tells(key: object) -> bool:
    if not isinstance(key, str) or not _is_key(key) or "kubernetes.io/" in key or "k8s.io/" in key:
        return False
    resource = key.removesuffix(".memory")
    return key.startswith(_OURS) or key in _PRODUCT.values() or (resource != key and is_resource(resource))


def _is_key(key: str) -> bool:
    """Domains here are berth's own and those of resources, which are good ones."""
    return _KEY_NAME.fullmatch(key.partition("/")[2]) is not None
