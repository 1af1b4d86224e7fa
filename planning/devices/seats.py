"""Decides which seats a node offers: from a GPUSeatProfile's spec, the GPUs that there are, and what pods hold now.

For the node's allocation core, at every change of one of them. Nothing is taken from a running pod: a held seat stays
with its group and its GPUs until it is let go, and what conflicts with it waits. A configuration that this node cannot
serve whole leaves the one before it in place, whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from crds.gpuseatprofile import MOST_INDEX, MOST_NAME, GPUGroup, GPUSeatProfileSpec, SeatProfile
from planning.devices.cards import Card, Link
from planning.devices.groups import partitioned, sizes_for
from planning.devices.offering import Seat


@dataclass(frozen=True, slots=True)
class SeatPlan:
    """What a node offers as seats.

    `problems`: what is refused, a sentence each that names profile, group and the node's GPUs. `waiting`: what waits
    until a pod ends, or goes with it, a sentence each. `withheld`: ids of all GPUs that are not nvidia.com/gpu because
    of seats, those that a waiting group is to get among them. `accepted`: what to hand in as `last` the next time.
    """

    seats: tuple[Seat, ...] = ()
    problems: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    withheld: frozenset[str] = frozenset()
    accepted: GPUSeatProfileSpec | None = None

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The cards of each group that has seats."""
        return {seat.group: seat.cards for seat in self.seats}


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    cards: tuple[str, ...]
    profile: SeatProfile

    def seats(self) -> Iterable[Seat]:
        for number in range(1, self.profile.seats_per_group + 1):
            yield Seat(seat_id(self.name, number), self.profile.resource, self.name, self.cards)


@dataclass(frozen=True, slots=True)
class _Layout:
    groups: list[_Group] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def seat_id(group: str, number: int) -> str:
    """A seat's device id, its name everywhere; `number` from 1 on."""
    return f"kyb-{group}-s{number}"


def configured(
    spec: object,
    cards: Iterable[Card],
    links: Iterable[Link] = (),
    present: Sequence[Seat] = (),
    *,
    busy: Collection[str] = (),
    last: GPUSeatProfileSpec | None = None,
) -> SeatPlan:
    """The seats of a node. Never raises.

    `spec`: a GPUSeatProfileSpec, or what somebody wrote as one, whatever it is; None where no seats are wanted.
    `cards`: all cards of the node, also those that just do not answer. `present`: the seats that running pods hold.
    `busy`: ids of cards that running pods hold whole, by nvidia.com/gpu. `last`: the configuration that this node
    accepted before (`SeatPlan.accepted`).
    """
    gpus = _Node(cards, links)
    held = {seat.id: seat for seat in reversed(present)}
    wanted, problem = _read(spec)
    if problem:
        problems = [f"The seat configuration is refused: {problem}.{_kept(last)}"]
        layout = gpus.layout(last, held.values()) if last is not None else _Layout()
        wanted = last
    else:
        layout = gpus.layout(wanted, held.values()) if wanted is not None else _Layout()
        problems = layout.problems
        if problems and last is not None and last != wanted:
            problems = [f"{each}{_kept(last)}" for each in problems]
            layout, wanted = gpus.layout(last, held.values()), last
    return replace(_settled(gpus, layout.groups, held, busy), problems=tuple(problems), accepted=wanted)


def _settled(gpus: _Node, groups: list[_Group], held: Mapping[str, Seat], busy: Collection[str]) -> SeatPlan:
    """The seats of these groups beside those that are held."""
    seats = dict(held)
    withheld = {card for seat in held.values() for card in seat.cards}
    waiting: list[str] = []
    for group in groups:
        withheld.update(group.cards)
        if why := _conflict(gpus, group, held.values(), busy):
            told = f"Group {group.name} ({gpus.told(group.cards)}) of profile {group.profile.name}"
            waiting.append(f"{told} waits: {why}.")
            continue
        mine = next((seat.cards for seat in held.values() if seat.group == group.name), group.cards)
        for seat in replace(group, cards=mine).seats():
            seats.setdefault(seat.id, seat)
    meant = {(seat.id, frozenset(seat.cards)) for group in groups for seat in group.seats()}
    waiting += [
        f"Seat {seat.id} ({gpus.told(seat.cards)}) is no longer configured: it stays until the pod that holds it ends."
        for seat in sorted(held.values(), key=_order)
        if (seat.id, frozenset(seat.cards)) not in meant
    ]
    return SeatPlan(tuple(sorted(seats.values(), key=_order)), (), tuple(waiting), frozenset(withheld))


def _conflict(gpus: _Node, group: _Group, held: Iterable[Seat], busy: Collection[str]) -> str:
    """Why a group cannot be had now, '' if it can."""
    mine = set(group.cards)
    for seat in sorted(held, key=_order):
        same = seat.group == group.name and set(seat.cards) == mine and seat.resource == group.profile.resource
        if same:
            continue
        if common := [card for card in group.cards if card in seat.cards]:
            return f"{gpus.told(common)} belongs to seat {seat.id}, which a running pod holds; it comes when that ends"
        if seat.group == group.name:
            return f"a running pod holds seat {seat.id} of the {group.name} before it; it comes when that pod ends"
    if taken := [card for card in group.cards if card in busy]:
        return f"a running pod holds {gpus.told(taken)} whole, as nvidia.com/gpu; it comes when that pod ends"
    return ""


class _Node:
    """The GPUs of a node that can be in groups, and how they are called."""

    def __init__(self, cards: Iterable[Card], links: Iterable[Link]) -> None:
        every = sorted({card.id: card for card in cards}.values(), key=lambda card: (card.index, card.id))
        divided = {card.parent for card in every if card.parent}
        whole = [card for card in every if card.vendor == "nvidia" and not card.parent]
        self._divided = {card.id for card in whole if card.id in divided or not card.resource}
        self._all = {card.id: card for card in whole}
        self._gpus = [card for card in whole if card.id not in self._divided]
        self._links = tuple(links)
        indices = [card.index for card in self._gpus]
        sane = len({*indices}) == len(indices) and all(0 <= index <= MOST_INDEX for index in indices)
        self._numbers = {card.id: card.index if sane else rank for rank, card in enumerate(self._gpus)}

    def told(self, cards: Iterable[str]) -> str:
        """`GPU 0`, `GPUs 0 and 1`; by id where a card is not there any more."""
        known = [self._all[card].index if card in self._all else card for card in cards]
        return _listed(known)

    def layout(self, spec: GPUSeatProfileSpec, held: Iterable[Seat]) -> _Layout:
        """The groups that the spec means here, and what is wrong with the others."""
        if spec.gpu_topology is None:
            return self._found(spec, list(held))
        layout = _Layout()
        owners: dict[str, str] = {}
        profiles = {profile.group_size: profile for profile in spec.profiles}
        for group in spec.gpu_topology.groups:
            profile = profiles[len(group.gpus)]
            cards, why = self._named(group)
            if not why and (shared := next((card for card in cards if card in owners), "")):
                why = f"{self.told([shared])} is in group {owners[shared]} already, and a GPU may be in one group only"
            if why:
                layout.problems.append(
                    f"Group {group.name} ({_listed(group.gpus)}) of profile {profile.name} is refused: {why}."
                )
                continue
            owners |= dict.fromkeys(cards, group.name)
            layout.groups.append(_Group(group.name, cards, profile))
        return layout

    def _named(self, group: GPUGroup) -> tuple[tuple[str, ...], str]:
        """The cards that a group names, by index; or why there are no such."""
        found: list[Card] = []
        for gpu in group.gpus:
            card = next((each for each in self._all.values() if _is(each, gpu)), None)
            if card is None:
                return (), f"there is no GPU {gpu}; {self._there()}"
            if card.id in self._divided:
                return (), f"GPU {gpu} is divided into MIG instances, and seats need whole GPUs; {self._there()}"
            if card in found:
                return (), f"GPU {gpu} is named twice, by index and by UUID; {self._there()}"
            found.append(card)
        found.sort(key=lambda card: (card.index, card.id))
        return tuple(card.id for card in found), ""

    def _there(self) -> str:
        if not self._gpus:
            return "this node shows no NVIDIA GPU that can be in a group. Does its driver run (nvidia-smi)?"
        return (
            f"this node has {_listed([card.index for card in self._gpus])}. Name those, or exclude it by nodeSelector"
        )

    def _found(self, spec: GPUSeatProfileSpec, held: list[Seat]) -> _Layout:
        """Groups by how the GPUs are connected. Groups of held seats that would have been divided otherwise stay, and
        the rest is divided around them.
        """
        profiles = {profile.group_size: profile for profile in spec.profiles}
        best = self._divided_into(profiles, (), ())
        if not best and self._all:  # a node without GPUs has nothing to refuse: few selectors leave such nodes out
            names = ", ".join(f"{each.name} takes groups of {size}" for size, each in sorted(profiles.items()))
            return _Layout([], [f"No group can be made for its profiles ({names}): {self._there()}."])
        made = {(group.name, frozenset(group.cards)) for group in best}
        if all((seat.group, frozenset(seat.cards)) in made for seat in held):
            return _Layout(best)
        fixed = {
            seat.group: _Group(seat.group, seat.cards, profiles[len(seat.cards)])
            for seat in held
            if len(seat.cards) in profiles
        }
        taken = {card for seat in held for card in seat.cards}
        return _Layout([*fixed.values(), *self._divided_into(profiles, fixed.values(), taken)])

    def _divided_into(
        self, profiles: Mapping[int, SeatProfile], fixed: Collection[_Group], taken: Collection[str]
    ) -> list[_Group]:
        """The GPUs that are not taken as groups beside the fixed ones; GPUs of two products never share one."""
        groups: list[_Group] = []
        for product in sorted({card.product for card in self._gpus}):
            cards = [card for card in self._gpus if card.product == product]
            sizes = list(sizes_for(len(cards), profiles))
            for group in fixed:
                if len(group.cards) in sizes and any(card.id in group.cards for card in cards):
                    sizes.remove(len(group.cards))
            free = [card for card in cards if card.id not in taken]
            found = partitioned(free, self._links, sizes)
            groups += [_Group(self._name(each), each, profiles[len(each)]) for each in found]
        return groups

    def _name(self, cards: Sequence[str]) -> str:
        """`G01` for GPUs 0 and 1; `G00-01` on nodes with more than ten, lest 1 and 2 be called as 12 is."""
        numbers = [self._numbers[card] for card in cards]
        if max(self._numbers.values()) < 10:
            return "G" + "".join(map(str, numbers))
        name = "G" + "-".join(f"{number:02}" for number in numbers)
        return name if len(name) <= MOST_NAME else f"G{numbers[0]}x{len(numbers)}"


def _read(spec: object) -> tuple[GPUSeatProfileSpec | None, str]:
    if spec is None or isinstance(spec, GPUSeatProfileSpec):
        return spec, ""
    return GPUSeatProfileSpec.parse(spec)


def _kept(last: GPUSeatProfileSpec | None) -> str:
    return " The configuration before it stays in place, whole." if last is not None else ""


def _is(card: Card, gpu: int | str) -> bool:
    return card.index == gpu if isinstance(gpu, int) else card.id.lower() == gpu.lower()


def _listed(gpus: Sequence[int | str]) -> str:
    """`GPU 0`, `GPUs 0 and 1`, `GPUs 0, 1 and 2`."""
    if len(gpus) == 1:
        return f"GPU {gpus[0]}"
    return f"GPUs {', '.join(map(str, gpus[:-1]))} and {gpus[-1]}" if gpus else "no GPUs"


def _order(seat: Seat) -> tuple[str, int, str]:
    number = seat.id.rpartition("-s")[2]
    return seat.group, int(number) if number.isdecimal() and len(number) < 6 else 0, seat.id
