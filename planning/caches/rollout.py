"""Decides what the nodes are to do next about one kernel cache: which digest they shall have, who is ordered to prepare
it now, when a bad one is given up for the last that was good, and who must let go of a cache that leaves.

For the look of a cache's workflow. Pure: what is carried (`Rollout`), what is found and asked for (`Nodes`, `Wanted`),
and the step that follows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from crds.kernelcache import TritonKernelCacheSpec
from planning.caches.orders import NodeOrder, Outcome, Report

AT_ONCE = 64  # orders that are under way for one cache: what a registry and the control plane bear together
SILENT = 600_000  # milliseconds, as epochs are: an order without an answer for so long no longer keeps others waiting
MESSAGE = 240  # bytes that are kept of what each of a thousand nodes says; the node's own status has the whole
_REASON = 64
_SOME = "unknown"  # a digest that is no image's: which one a node has is not known, only that it may have one
_LARGEST = 2**53  # of epochs that a node may claim; what clocks say has room below it for 200,000 years


@dataclass(frozen=True, slots=True)
class Member:
    """A node that has had an order. `key` is what the order was about, `digest` what it was to have ('': nothing, it
    is to let go); `outcome` is '' until the node has answered. The rest is its last report.
    """

    epoch: int
    key: str
    digest: str
    outcome: Outcome | str = ""
    serves: str = ""
    reason: str = ""
    message: str = ""
    pods: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """An image that nodes can be told to have: registry/repository and digest; both empty for none."""

    image: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """That a registry could not be asked: what for, under which `generation` of the spec, the reason and the sentence
    for a condition, and the moment from which it is asked again.
    """

    reference: str
    generation: int
    reason: str
    message: str
    until: float


@dataclass(frozen=True, slots=True)
class Aim:
    """What a rollout is about, apart from its nodes.

    `latest` is what the reference stood for when it was `asked` last, at `asked_at`; `reference` is the one that was
    asked for. `goal` is what nodes shall have, `good` the last that was ready everywhere. `rejected` is a digest that
    was given up, `why`, and `under` which spec and rules. `refused`: why the registry said nothing when it was
    asked last.
    """

    reference: str = ""
    latest: Target = field(default_factory=Target)
    asked_at: float = 0.0
    goal: Target = field(default_factory=Target)
    good: Target = field(default_factory=Target)
    rejected: str = ""
    why: str = ""
    under: str = ""
    refused: Refused | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """All that is carried: `epoch` is the newest that any order had."""

    aim: Aim = field(default_factory=Aim)
    members: Mapping[str, Member] = field(default_factory=dict)
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes as a look finds them. `selected`: those that the cache is for, and whether each is ready to be told
    something; `alive`: all that there are; `rechecked`: those whose hardware or store is another than it was;
    `holding`: those that show that they have the cache.
    """

    selected: Mapping[str, bool]
    alive: frozenset[str]
    rechecked: frozenset[str] = frozenset()
    holding: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a cache's object asks for. `rules`: for each image that an aim may name, what stands for whatever decides
    about trust in it. `at_once`: how many orders may be under way.
    """

    generation: int
    spec: TritonKernelCacheSpec
    rules: Mapping[str, str]
    at_once: int = AT_ONCE


@dataclass(frozen=True, slots=True)
class Sent:
    """An order to a node, and what it is about."""

    node: str
    key: str
    order: NodeOrder


@dataclass(frozen=True, slots=True)
class Step:
    """What a look decides: the aim from now on, orders to send, nodes to forget, and whether a leave is complete.
    `adopted`: nodes that have the cache although nothing is carried of them.
    """

    aim: Aim
    adopted: tuple[str, ...] = ()
    orders: tuple[Sent, ...] = ()
    forgotten: tuple[str, ...] = ()
    over: bool = False


def next_ask(spec: TritonKernelCacheSpec, aim: Aim) -> float | None:
    """The moment (epoch seconds) from which the registry is to be asked what the reference stands for; None: never.

    One with a digest never is. `Always` and OnTagChange ask at each interval, others once for each reference. One that
    was never asked for is due since ever: 0.
    """
    if "@" in spec.oci_image.image or spec.oci_image.pull_policy == "Never":
        return None
    if aim.reference != spec.oci_image.image:
        return 0.0
    again = spec.update_policy.type == "OnTagChange" or spec.oci_image.pull_policy == "Always"
    return aim.asked_at + spec.update_policy.interval_seconds if again else None


def answered(aim: Aim, reference: str, latest: Target, now: float, follow: bool) -> Aim:
    """The aim after a reference was found to stand for `latest`. `follow`: whether a tag that moved is followed; a
    reference that somebody wrote anew always is.
    """
    written = aim.reference != reference
    aim = replace(aim, reference=reference, latest=latest, asked_at=now, refused=None)
    if written:
        return replace(aim, goal=latest, rejected="", why="", under="")
    if follow and latest.digest not in (aim.goal.digest, aim.rejected):
        return replace(aim, goal=latest, rejected="", why="", under="")
    return aim


def images(aim: Aim) -> set[str]:
    """All images (`registry/repository`) that a step may order while this is the aim."""
    return {each.image for each in (aim.latest, aim.goal, aim.good) if each.image}


def step(rollout: Rollout, wanted: Wanted, nodes: Nodes, first_epoch: int) -> Step:
    """The next step of a cache that is to be there.

    `first_epoch` is at least what the next order's epoch must be, also after all that was carried was lost.
    """
    known = _adopted(rollout, nodes)
    rollout = _with(rollout, known)
    aim = _reconsidered(rollout.aim, wanted)
    aim = _settled(_rolled_back(aim, rollout, wanted), rollout, wanted, nodes)
    epoch = max(rollout.epoch + 1, first_epoch)
    orders: list[Sent] = []
    if aim.goal.digest:
        key = _key(aim.goal, wanted)
        order = NodeOrder(epoch, "prepare", aim.goal.image, aim.goal.digest, wanted.generation)
        orders += [Sent(name, key, order) for name in _next(rollout, nodes, order, key, wanted)]
    orders += _farewells(rollout, nodes, NodeOrder(epoch, "remove", generation=wanted.generation))
    forgotten = tuple(name for name in sorted(rollout.members) if _gone(name, rollout.members[name], nodes))
    return Step(aim, known, tuple(orders), forgotten)


def farewell(rollout: Rollout, generation: int, nodes: Nodes, first_epoch: int, *, forced: bool) -> Step:
    """The next step of a cache that is being deleted: every live node lets go of it first, unless it is `forced`."""
    nodes = replace(nodes, selected={})
    known = _adopted(rollout, nodes)
    rollout = _with(rollout, known)
    order = NodeOrder(max(rollout.epoch + 1, first_epoch), "remove", generation=generation)
    forgotten = tuple(name for name in sorted(rollout.members) if _gone(name, rollout.members[name], nodes))
    left = rollout.members.keys() - set(forgotten)
    return Step(rollout.aim, known, tuple(_farewells(rollout, nodes, order)), forgotten, over=forced or not left)


def applied(rollout: Rollout, step: Step) -> Rollout:
    """What is carried after a step was taken. The answers of before are kept until the node answers anew."""
    known = _with(rollout, step.adopted).members
    members = {name: each for name, each in known.items() if name not in step.forgotten}
    epoch = rollout.epoch
    for sent in step.orders:
        before = members.get(sent.node, Member(0, "", ""))
        members[sent.node] = replace(
            before, epoch=sent.order.epoch, key=sent.key, digest=sent.order.digest, outcome="", reason="", message=""
        )
        epoch = max(epoch, sent.order.epoch)
    return Rollout(step.aim, members, epoch)


def reported(rollout: Rollout, report: Report) -> Rollout:
    """What is carried after a node answered; one to an order that is not its newest says nothing any more."""
    member = rollout.members.get(report.node)
    if member is None or member.epoch != report.epoch:
        return rollout
    # A node that says "removed" where it was to have something was deleted meanwhile: the order is void, and should
    # there be one of that name again it is told anew.
    void = report.outcome == "removed" and member.digest != ""
    digest, epoch = member.digest, rollout.epoch
    if 0 < report.newest <= _LARGEST:
        # What gave that order was lost, and the clock was ahead then. The next one, which is due now, is above it.
        void, digest, epoch = True, digest or _SOME, max(epoch, report.newest)
    told = replace(
        member, key="" if void else member.key, digest=digest, outcome=report.outcome, serves=report.serves,
        reason=report.reason[:_REASON], message=_short(report.message), pods=report.pods,
    )  # fmt: skip
    return replace(rollout, members={**rollout.members, report.node: told}, epoch=epoch)


def under_way(members: Iterable[Member], epoch: int) -> int:
    """How many of them were told something lately, seen from the order of this epoch, and have not answered."""
    return sum(member.outcome == "" and member.epoch > epoch - SILENT for member in members)


def unavailable(most: int | str, nodes: int) -> int:
    """How many of so many nodes may be without the new digest: a number, or a share rounded down; at least one."""
    if isinstance(most, str):
        return max(1, nodes * int(most.removesuffix("%")) // 100)
    return most


def _adopted(rollout: Rollout, nodes: Nodes) -> tuple[str, ...]:
    """Whom to wait for and to tell although nothing is carried of them: no order was ever given, as far as is known,
    and yet they have the cache, so what was carried was lost.
    """
    return () if rollout.epoch else tuple(sorted((nodes.holding & nodes.alive) - rollout.members.keys()))


def _with(rollout: Rollout, adopted: tuple[str, ...]) -> Rollout:
    members = {**{name: Member(0, "", _SOME, "ready") for name in adopted}, **rollout.members}
    return replace(rollout, members=members) if adopted else rollout


def _short(message: str) -> str:
    plain = "".join(each if each.isprintable() else " " for each in message[: MESSAGE + 1])
    data = plain.encode()
    return plain if len(data) <= MESSAGE else data[: MESSAGE - 3].decode(errors="ignore") + "…"


def _key(goal: Target, wanted: Wanted) -> str:
    """What an order is about: with another key the node has to look again."""
    spec = wanted.spec
    parts = (
        goal.image, goal.digest, wanted.rules.get(goal.image, ""), spec.oci_image.model_dump_json(exclude={"image"}),
        str(spec.validate_signature), spec.mount_path or "", spec.runtime.model_dump_json(),
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _under(aim: Aim, wanted: Wanted) -> str:
    """By what the image that the reference names is judged: that of a digest that was given up."""
    return f"{wanted.generation}/{wanted.rules.get(aim.latest.image, '')}"


def _reconsidered(aim: Aim, wanted: Wanted) -> Aim:
    """The aim, with what was given up tried again if somebody changed what it was judged by."""
    if not aim.rejected or aim.under == _under(aim, wanted):
        return aim
    goal = aim.latest if aim.latest.digest == aim.rejected else aim.goal
    return replace(aim, goal=goal, rejected="", why="", under="")


def _rolled_back(aim: Aim, rollout: Rollout, wanted: Wanted) -> Aim:
    """The aim, back at the last good one if a node says that the new image itself is at fault."""
    if not wanted.spec.update_policy.automatic_rollback or not aim.good.digest or aim.good == aim.goal:
        return aim
    key = _key(aim.goal, wanted)
    for name in sorted(rollout.members):
        member = rollout.members[name]
        if member.outcome == "failed" and member.key == key:
            why = f"{name}: {member.message}"[:512]
            return replace(aim, goal=aim.good, rejected=aim.goal.digest, why=why, under=_under(aim, wanted))
    return aim


def _settled(aim: Aim, rollout: Rollout, wanted: Wanted, nodes: Nodes) -> Aim:
    """The aim, with what every node has by now as the last good one."""
    if aim.goal == aim.good or not aim.goal.digest:
        return aim
    key = _key(aim.goal, wanted)
    ready = 0
    for name, usable in nodes.selected.items():
        member = rollout.members.get(name)
        if member is None or member.key != key or member.outcome not in ("ready", "incompatible"):
            if usable or (member is not None and member.outcome == "failed"):
                return aim
            continue  # a node that is away must not keep all others from having been good
        ready += member.outcome == "ready"
    return replace(aim, good=aim.goal) if ready else aim


def _next(rollout: Rollout, nodes: Nodes, order: NodeOrder, key: str, wanted: Wanted) -> list[str]:
    """Who is ordered now. A node that gives up another digest takes a place of `maxUnavailable` until it is ready;
    nodes that serve nothing, or this very digest already, wait for nobody.
    """
    goal = order.digest
    usable = {name: rollout.members.get(name) for name in sorted(nodes.selected) if nodes.selected[name]}
    changing = {name for name, member in usable.items() if member is not None and _changes(member)}
    room = unavailable(wanted.spec.update_policy.max_unavailable, len(nodes.selected)) - len(changing)
    busy = under_way((member for member in usable.values() if member is not None), order.epoch)
    chosen: list[str] = []
    for name, member in usable.items():
        if member is not None and member.key == key and name not in nodes.rechecked:
            continue
        if member is not None and member.serves not in ("", goal) and name not in changing:
            if room <= 0:
                continue
            room -= 1
        again = member is not None and member.outcome == ""  # it is under way already
        if not again and busy >= wanted.at_once:
            break
        busy += not again
        chosen.append(name)
    return chosen


def _changes(member: Member) -> bool:
    """Whether a node has been told to give up what it serves, and is not there yet."""
    told = bool(member.digest) and member.serves not in ("", member.digest)
    return told and member.outcome in ("", "retrying", "failed")


def _farewells(rollout: Rollout, nodes: Nodes, order: NodeOrder) -> list[Sent]:
    """Orders to let go, for live nodes that the cache is not for."""
    due = []
    for name in sorted(rollout.members):
        told = not rollout.members[name].digest and name not in nodes.rechecked
        if name not in nodes.selected and name in nodes.alive and not told:
            due.append(Sent(name, "", order))
    return due


def _gone(name: str, member: Member, nodes: Nodes) -> bool:
    """Whether a node need not be thought of any more: it is deleted, or it has let go as it was told."""
    return name not in nodes.alive or (member.outcome == "removed" and name not in nodes.selected)
