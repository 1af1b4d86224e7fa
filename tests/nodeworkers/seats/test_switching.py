"""Switches of a group's slot on a simulated node: whatever fails, and wherever the process is killed, never two seats
on the GPUs, nothing left halfway, and whoever is to have the slot gets it in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeworkers.ledger import Ledger
from nodeworkers.seats.slots import Slot, Slots, SupersededError
from nodeworkers.seats.switching import Cleared, Filled, Group, Patience
from tests.nodeworkers.seats.simulated_world import GROUP, Fault, KilledError, SimulatedWorld

A, B, C = "kyb-G01-s1", "kyb-G01-s2", "kyb-G01-s3"
SHORT = Patience(settle=0.05, free=0.02, start=0.05, serve=0.02, again=5.0)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "berth")
    yield made
    made.close()


@pytest.fixture
def world(ledger: Ledger) -> SimulatedWorld:
    made = SimulatedWorld(Slots(ledger))
    made.slots.enter(GROUP, "run")
    return made


def group(world: SimulatedWorld, run: str = "run") -> Group:
    return Group(GROUP, world.slots.enter(GROUP, run), world.slots, world, SHORT)


async def switch(world: SimulatedWorld, seat: str) -> tuple[Cleared, Filled | None]:
    world.wanted = seat
    cleared = await group(world).clear()
    return cleared, await group(world).fill(cleared.next) if cleared.next else None


async def active(world: SimulatedWorld, seat: str, *others: str) -> None:
    """`seat` has the slot, the others were parked."""
    for each in others:
        world.add(each, "Parked")
    world.add(seat, "Running")
    await group(world).clear()
    assert world.slots.slot(GROUP).seat == seat
    world.calls.clear()


def state(world: SimulatedWorld, seat: str) -> str:
    return world.servers[seat].state


def slot(world: SimulatedWorld) -> Slot:
    return world.slots.slot(GROUP)


async def test_one_leaves_before_the_other_comes(world: SimulatedWorld) -> None:
    await active(world, A, B)
    cleared, filled = await switch(world, B)
    assert (cleared.phase, cleared.next, cleared.reason) == ("VerifyFree", B, "because")
    assert filled is not None and (filled.phase, filled.active) == ("Active", B)
    assert world.calls == [f"open {A}", f"close {A}", f"drain {A}", f"park {A}", f"wake {B}", f"open {B}"]
    assert {"drain", "park", "park: checkpoint"} <= cleared.seconds.keys()
    assert {"verify free", "wake", "wake: restore", "verify serving"} <= filled.seconds.keys()
    assert slot(world).switches == 1 and world.violations == []


async def test_where_nobody_is_to_have_it_nothing_is_done(world: SimulatedWorld) -> None:
    await active(world, A, B)
    cleared, filled = await switch(world, "")
    assert (cleared.phase, cleared.active, filled) == ("Active", A, None)
    assert world.calls == [f"open {A}"]


async def test_a_container_starts_with_the_slot_and_never_without(world: SimulatedWorld) -> None:
    world.add(A)
    world.add(B)
    world.kubelet()
    assert world.on_gpu() == []
    _, filled = await switch(world, A)
    assert filled is not None and filled.active == A and state(world, B) == "Waiting"
    _, filled = await switch(world, B)
    assert filled is not None and filled.active == B and state(world, A) == "Parked"
    assert world.violations == []


async def test_a_container_that_does_not_come_gives_the_slot_back(world: SimulatedWorld) -> None:
    world.add(A).starts = False
    _, filled = await switch(world, A)
    assert filled is not None and (filled.phase, filled.within) == ("Empty", SHORT.again)
    assert "its container does not run" in filled.reason and slot(world).phase == "Empty"


async def test_one_that_starts_and_never_serves_is_ended(world: SimulatedWorld) -> None:
    world.add(A, "Running").serves = False
    world.slots.put(Slot(GROUP, "Starting", A), world.slots.enter(GROUP, "run"), 0.0)
    cleared, _ = await switch(world, B)
    assert "did not come to serve" in cleared.reason and world.calls[-1] == f"discard {A}"


async def test_a_restart_of_the_active_container_keeps_the_slot(world: SimulatedWorld) -> None:
    await active(world, A, B)
    world.servers[A].state, world.servers[A].serves = "Waiting", False
    cleared, _ = await switch(world, "")
    assert (cleared.phase, cleared.active, state(world, A)) == ("Active", A, "Running")


async def test_a_seat_whose_pod_is_gone_leaves_the_slot(world: SimulatedWorld) -> None:
    await active(world, A, B)
    world.servers[A].state, world.servers[A].serves = "Absent", False
    _, filled = await switch(world, B)
    assert filled is not None and filled.active == B and f"park {A}" not in world.calls


async def test_what_never_drains_is_not_parked_and_serves_on(world: SimulatedWorld) -> None:
    await active(world, A, B)
    world.busy = "3 requests still run after 60 s"
    cleared, filled = await switch(world, B)
    assert (cleared.phase, cleared.active, cleared.within, filled) == ("Active", A, SHORT.again, None)
    assert "3 requests still run" in cleared.reason and "3 requests still run" in slot(world).reason
    assert not world.servers[A].held and state(world, A) == "Running"


@pytest.mark.parametrize(
    ("fault", "after", "phase"),
    [
        ("untouched", "Running", "Active"),
        ("locked", "Running", "Active"),
        ("lost", "Waiting", "VerifyFree"),
        ("unsettled", "Parked", "VerifyFree"),
        ("failed", "Waiting", "VerifyFree"),
        ("hangs", "Changing", "Quarantined"),
    ],
)
async def test_a_park_that_goes_wrong(world: SimulatedWorld, fault: Fault, after: str, phase: str) -> None:
    await active(world, A, B)
    world.faults["park"] = fault
    world.wanted = B
    cleared = await group(world).clear()
    assert (cleared.phase, state(world, A)) == (phase, after)
    assert world.violations == [] and world.calls.count(f"park {A}") == 1, "no call is repeated"
    assert world.servers[A].held is (phase != "Active")
    if phase == "Quarantined":
        assert "is not broken off" in cleared.reason and slot(world).reason == cleared.reason


@pytest.mark.parametrize(
    ("fault", "phase", "after"),
    [
        ("untouched", "Empty", "Parked"),
        ("lost", "Active", "Running"),
        ("unsettled", "Restoring", "Changing"),
        ("failed", "Restoring", "Changing"),
    ],
)
async def test_a_wake_that_goes_wrong(world: SimulatedWorld, fault: Fault, phase: str, after: str) -> None:
    await active(world, A, B)
    world.faults["wake"] = fault
    _, filled = await switch(world, B)
    assert filled is not None and (filled.phase, state(world, B)) == (phase, after)
    if fault == "lost":
        assert world.calls[-2:] == [f"discard {B}", f"open {B}"], "it started cold, in the slot that it had"
    for _ in range(3):
        _, filled = await switch(world, B)
    assert slot(world).seat == B and state(world, B) == "Running" and world.violations == []


async def test_killed_between_lock_and_checkpoint_it_is_unlocked_and_serves_on(world: SimulatedWorld) -> None:
    await active(world, A, B)
    world.faults["park"] = "killed while locked"
    with pytest.raises(KilledError):
        await switch(world, B)
    cleared, _ = await switch(world, "")
    assert (cleared.active, state(world, A)) == (A, "Running") and world.calls[-2:] == [f"wake {A}", f"open {A}"]
    assert world.violations == []


async def test_a_server_that_its_driver_gave_up_is_ended_whoever_has_the_slot(world: SimulatedWorld) -> None:
    await active(world, A, B)
    world.servers[B].state = "Failed"
    await switch(world, "")
    assert state(world, B) == "Waiting" and state(world, A) == "Running"


async def test_nothing_is_woken_beside_a_foreigner(world: SimulatedWorld) -> None:
    await active(world, A, B)
    world.foreign = "process 4711 (python), which is no seat's, holds 20 GiB of GPU 0"
    _, filled = await switch(world, B)
    assert filled is not None and filled.phase == "Quarantined" and "process 4711" in filled.reason
    since = slot(world).since
    await switch(world, B)
    assert (slot(world).phase, slot(world).since) == ("Quarantined", since), "people see how long"
    world.foreign = ""
    _, filled = await switch(world, B)
    assert filled is not None and filled.active == B and world.violations == []


async def test_a_foreigner_that_comes_between_the_two_halves_is_seen(world: SimulatedWorld) -> None:
    await active(world, A, B)
    world.wanted = B
    cleared = await group(world).clear()
    world.foreign = "somebody"
    filled = await group(world).fill(cleared.next)
    assert filled.phase == "Quarantined" and state(world, B) == "Parked" and world.violations == []


async def test_after_the_ledger_is_lost_the_one_that_serves_has_the_slot(world: SimulatedWorld) -> None:
    world.add(A, "Parked")
    world.add(B, "Running")
    cleared, _ = await switch(world, "")
    assert (cleared.phase, cleared.active) == ("Active", B)


async def test_of_two_on_the_gpus_one_is_parked_and_nobody_is_ended(world: SimulatedWorld) -> None:
    await active(world, B, C)
    world.add(A, "Running").held = True
    cleared, _ = await switch(world, "")
    assert (cleared.active, state(world, A), state(world, B)) == (B, "Parked", "Running")
    assert "discard" not in " ".join(world.calls)


async def test_two_that_cannot_be_parted_are_left_alone_and_told(world: SimulatedWorld) -> None:
    await active(world, B)
    world.add(A, "Running").held = True
    world.faults["park"] = "untouched"
    cleared, _ = await switch(world, "")
    assert cleared.phase == "Quarantined" and A in cleared.reason and B in cleared.reason


async def test_a_run_that_another_followed_acts_no_more(world: SimulatedWorld) -> None:
    await active(world, A, B)
    old = group(world)
    group(world, "newer")
    world.wanted = B
    with pytest.raises(SupersededError):
        await old.clear()
    with pytest.raises(SupersededError):
        await old.fill(B)
    assert state(world, A) == "Running" and not [call for call in world.calls if call.split()[0] != "open"]


async def test_a_group_that_is_gone_is_said_to_be(world: SimulatedWorld) -> None:
    await active(world, A)
    world.gone = True
    cleared, _ = await switch(world, "")
    assert cleared.gone and slot(world).phase == "Empty"


KILLED = [(call, after) for call in range(1, 9) for after in (False, True)]


@pytest.mark.parametrize(("call", "after"), KILLED)
async def test_killed_at_any_step_it_goes_on_from_there(ledger: Ledger, call: int, after: bool) -> None:
    world = SimulatedWorld(Slots(ledger))
    await active(world, A, B)
    world.die_at, world.die_after = call, after
    for _ in range(4):
        try:
            await switch(world, B)
        except KilledError:
            world.slots = Slots(ledger)
            world.kubelet()
    assert (slot(world).phase, slot(world).seat) == ("Active", B)
    assert (state(world, A), state(world, B)) == ("Parked", "Running") and world.violations == []
    assert not world.servers[B].held and world.calls.count(f"wake {B}") <= 2


FAULTS = st.sampled_from(["park", "wake"]).flatmap(
    lambda call: st.tuples(st.just(call), st.sampled_from(get_args(Fault)))
)
STEPS = st.one_of(
    st.tuples(st.just("want"), st.sampled_from([A, B, C, ""])),
    st.tuples(st.just("kill"), st.integers(1, 8), st.booleans()),
    st.tuples(st.just("fault"), FAULTS),
    st.tuples(st.just("exit"), st.sampled_from([A, B, C])),
    st.tuples(st.just("foreign"), st.booleans()),
    st.tuples(st.just("busy"), st.booleans()),
    st.tuples(st.just("ledger lost")),
    st.tuples(st.just("new run"), st.integers(0, 3)),
)


@given(st.lists(STEPS, max_size=25))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_one_seat_at_most_is_on_the_gpus_and_all_comes_right(
    ledger: Ledger, steps: list[tuple[object, ...]]
) -> None:
    asyncio.run(_happens(ledger, steps))


async def _happens(ledger: Ledger, steps: list[tuple[object, ...]]) -> None:
    ledger.execute("DELETE FROM seat_groups", ())
    world, run = SimulatedWorld(Slots(ledger)), "run"
    for seat in (A, B, C):
        world.add(seat)
    for step in steps:
        match step:
            case ("want", str(seat)):
                world.wanted = seat
            case ("kill", int(call), bool(after)):
                world.die_at, world.die_after = call, after
            case ("fault", (str(name), fault)):
                world.faults[name] = fault  # type: ignore[assignment]
            case ("exit", str(seat)) if state(world, seat) in ("Running", "Parked"):
                world.servers[seat].state, world.servers[seat].serves = "Waiting", False
            case ("foreign", bool(there)):
                world.foreign = "somebody" if there else ""
            case ("busy", bool(there)):
                world.busy = "one request" if there else ""
            case ("ledger lost",):
                ledger.execute("DELETE FROM seat_groups", ())
                world.slots = Slots(ledger)
            case ("new run", int(number)):
                run = f"{run}{number}"
        try:
            cleared = await group(world, run).clear()
            if cleared.next:
                await group(world, run).fill(cleared.next)
        except KilledError:
            world.slots = Slots(ledger)
        world.kubelet()
    world.faults, world.die_at, world.die_after, world.foreign, world.busy = {}, 0, False, "", ""
    for each in world.servers.values():
        each.ends_in = min(each.ends_in, 2)
    world.wanted = A
    for _ in range(6):
        cleared = await group(world, run).clear()
        if cleared.next:
            await group(world, run).fill(cleared.next)
    assert (slot(world).phase, slot(world).seat) == ("Active", A), slot(world)
    assert world.on_gpu() == [A] and world.violations == []
    assert all(each.state in ("Running", "Parked", "Waiting") for each in world.servers.values())
