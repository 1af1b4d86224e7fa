"""Who holds which device: never free while somebody has it, never held for ever, and where the kubelet and the record
disagree somebody is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.devices import holdings as holdings_module
from nodeworkers.devices.holdings import (
    GRACE_SECONDS,
    MISSES,
    POLL_SECONDS,
    Drift,
    Holder,
    Holding,
    Holdings,
    PodResourcesError,
)
from nodeworkers.devices.records import Records
from nodeworkers.ledger import Ledger

N150 = "tenstorrent.com/n150"


class Kubelet:
    """A podresources service that shows what a test says, or is away."""

    def __init__(self) -> None:
        self.shown: list[Holding] = []
        self.away = ""
        self.hangs = False

    async def list(self) -> Sequence[Holding]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.away:
            raise PodResourcesError(self.away)
        return list(self.shown)


class Rig:
    """Holdings over a ledger, beside a kubelet, with a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.kubelet = Kubelet()
        self.drifts: list[Drift] = []
        self.ledger = Ledger(folder)
        self.folder = folder
        self.start()

    def start(self) -> None:
        self.records = Records(self.ledger)
        self.holdings = Holdings(
            self.kubelet, self.records, lambda resource: resource.startswith("tenstorrent.com/"), self.drifts.append,
            lambda: self.now, lambda: 1.7e9 + self.now,
        )  # fmt: skip

    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.folder)
        self.start()

    def give(self, *ids: str, claim: str = "") -> None:
        """As the allocation core does it."""
        self.records.remember_allocation(N150, ids, None, 1.7e9 + self.now, claim)
        self.holdings.given(N150, ids, claim)

    def show(self, *pods: str) -> None:
        """What the kubelet shows: `pod=device,device` each, with the container `main`, or `pod/container=…`."""
        self.kubelet.shown = []
        for each in pods:
            name, _, ids = each.partition("=")
            pod, _, container = name.partition("/")
            self.kubelet.shown += [Holding("team-a", pod, container or "main", N150, id) for id in ids.split(",")]

    async def polls(self, seconds: float) -> None:
        """All polls of so many seconds."""
        for _ in range(round(seconds / POLL_SECONDS)):
            self.now += POLL_SECONDS
            await self.holdings.look()

    @property
    def held(self) -> set[str]:
        return set(self.holdings.held)

    def on_record(self) -> set[str]:
        return {id for each in self.records.allocations() for id in each.ids}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.ledger.close()


async def test_what_a_pod_has_is_held_until_the_pod_has_gone(rig: Rig) -> None:
    rig.give("tt-1", "tt-2")
    assert rig.holdings.held == {"tt-1": Holder(N150), "tt-2": Holder(N150)}
    rig.show("trainer=tt-1,tt-2")
    await rig.polls(120)
    assert rig.holdings.held["tt-2"] == Holder(N150, "team-a", "trainer", ("main",), shown=True)
    rig.show()
    await rig.polls(POLL_SECONDS)
    assert rig.holdings.held["tt-2"] == Holder(N150, "team-a", "trainer", ("main",)), "one list may be wrong"
    await rig.polls(POLL_SECONDS)
    assert not rig.held and not rig.on_record() and not rig.drifts


async def test_what_was_given_is_held_for_as_long_as_the_kubelet_may_take_to_show_it(rig: Rig) -> None:
    await rig.polls(120)
    rig.give("tt-1")
    await rig.polls(GRACE_SECONDS - POLL_SECONDS)
    assert rig.held == {"tt-1"} and not rig.drifts
    await rig.polls(POLL_SECONDS)
    assert not rig.held and not rig.on_record()
    (drift,) = rig.drifts
    assert (drift.kind, drift.device_id) == ("NeverShown", "tt-1")
    assert drift.message == (
        f"tt-1 ({N150}) was given 60 s ago and the kubelet shows no pod that holds it: the pod ended at once, or was "
        "not admitted. It counts as free."
    )


async def test_two_lists_must_lack_it_however_late_they_come(rig: Rig) -> None:
    await rig.polls(120)
    rig.give("tt-1")
    rig.now += 10 * GRACE_SECONDS
    await rig.holdings.look()
    assert rig.held == {"tt-1"}
    await rig.polls(POLL_SECONDS)
    assert not rig.held


async def test_a_list_made_before_it_was_given_says_nothing_of_it(rig: Rig) -> None:
    rig.give("tt-1")
    rig.show("old=tt-1")
    await rig.polls(120)
    rig.show()

    async def give_meanwhile() -> Sequence[Holding]:
        rig.now += 1
        rig.give("tt-1")
        return []

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rig.kubelet, "list", give_meanwhile)
        await rig.holdings.look()
    rig.now += 2 * GRACE_SECONDS
    for expected in ({"tt-1"}, set[str]()):
        await rig.holdings.look()
        assert rig.held == expected


async def test_given_again_it_is_the_new_pods_and_has_its_time_anew(rig: Rig) -> None:
    rig.give("tt-1")
    rig.show("old=tt-1")
    await rig.polls(120)
    rig.show()
    await rig.polls(POLL_SECONDS)
    rig.give("tt-1")
    assert rig.holdings.held["tt-1"] == Holder(N150)
    await rig.polls(GRACE_SECONDS - POLL_SECONDS)
    assert rig.held == {"tt-1"}
    rig.show("new=tt-1")
    await rig.polls(POLL_SECONDS)
    assert rig.holdings.held["tt-1"].pod == "new" and not rig.drifts


async def test_while_the_kubelet_is_away_all_stays_as_it_was(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.give("tt-1")
    rig.give("tt-2")
    rig.show("trainer=tt-1")
    await rig.polls(120)
    rig.give("tt-2")
    before = dict(rig.holdings.held)
    rig.kubelet.away = "The kubelet does not answer."
    await rig.polls(3600)
    assert rig.holdings.held == before and rig.holdings.problem == "The kubelet does not answer."
    assert caplog.messages.count("The kubelet does not answer. What was known of it stays.") == 1
    rig.kubelet.away = ""
    rig.show()
    await rig.polls(POLL_SECONDS * MISSES)
    assert rig.held == {"tt-1", "tt-2"}, "a kubelet that has just started does not know its pods yet"
    rig.show("trainer=tt-1")
    await rig.polls(GRACE_SECONDS)
    assert rig.held == {"tt-1"} and not rig.holdings.problem


async def test_a_kubelet_that_restarted_between_two_lists_gets_its_time(rig: Rig) -> None:
    rig.give("tt-1")
    rig.show("trainer=tt-1")
    await rig.polls(120)
    rig.show()
    rig.holdings.kubelet_restarted()
    await rig.polls(GRACE_SECONDS - POLL_SECONDS)
    assert rig.held == {"tt-1"}
    await rig.polls(POLL_SECONDS)
    assert not rig.held


async def test_a_kubelet_that_hangs_is_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "_ANSWER_SECONDS", 0.05)
    rig.give("tt-1")
    rig.kubelet.hangs = True
    await rig.holdings.look()
    assert rig.holdings.problem == "The kubelet did not tell within 0.05 s who holds which device."
    assert rig.held == {"tt-1"}


async def test_what_was_never_given_is_taken_down_as_held_and_told(rig: Rig) -> None:
    rig.show("trainer=tt-1,tt-2", "other=tt-3")
    rig.kubelet.shown.append(Holding("team-b", "gpu", "main", "nvidia.com/gpu", "GPU-1"))
    await rig.polls(2 * POLL_SECONDS)
    assert rig.held == rig.on_record() == {"tt-1", "tt-2", "tt-3"}, "others' resources are not ours to know"
    assert {(each.kind, each.device_id) for each in rig.drifts} == {("NotGiven", f"tt-{n}") for n in (1, 2, 3)}
    assert rig.drifts[0].message == (
        f"The pod team-a/trainer holds tt-1 ({N150}), and this node has no record of having given it. It is taken down "
        "as held."
    )
    rig.restart()
    assert rig.held == {"tt-1", "tt-2", "tt-3"}
    await rig.polls(POLL_SECONDS)
    assert len(rig.drifts) == 3, "it is on record now"


async def test_one_device_in_two_pods_is_told_once_and_in_two_containers_is_none(rig: Rig) -> None:
    rig.give("tt-1", "tt-2")
    rig.show("trainer/init=tt-1", "trainer/main=tt-1,tt-2")
    await rig.polls(2 * POLL_SECONDS)
    assert rig.holdings.held["tt-1"].containers == ("init", "main") and not rig.drifts
    rig.show("trainer=tt-1,tt-2", "other=tt-2")
    await rig.polls(3 * POLL_SECONDS)
    (drift,) = rig.drifts
    assert (drift.kind, drift.device_id) == ("Doubled", "tt-2")
    assert "in more than one pod: team-a/trainer and team-a/other. Before" in drift.message
    rig.show("trainer=tt-1,tt-2")
    await rig.polls(POLL_SECONDS)
    rig.show("trainer=tt-1,tt-2", "other=tt-2")
    await rig.polls(POLL_SECONDS)
    assert [each.kind for each in rig.drifts] == ["Doubled", "Doubled"], "again is another time"


async def test_a_claim_holds_until_it_is_given_back_whatever_the_kubelet_shows(rig: Rig) -> None:
    rig.give("tt-1", claim="c-1")
    rig.give("tt-2", claim="c-1")
    await rig.polls(3600)
    rig.restart()
    await rig.polls(3600)
    assert rig.holdings.held == {"tt-1": Holder(N150, claim="c-1"), "tt-2": Holder(N150, claim="c-1")}
    rig.holdings.released("c-1")
    rig.holdings.released("c-9")
    assert not rig.held and not rig.drifts


async def test_after_a_restart_what_ended_meanwhile_is_forgotten_in_silence(rig: Rig) -> None:
    rig.give("tt-1")
    rig.give("tt-2")
    rig.restart()
    rig.show("trainer=tt-2")
    assert rig.held == {"tt-1", "tt-2"}
    await rig.polls(GRACE_SECONDS + POLL_SECONDS)
    assert rig.held == rig.on_record() == {"tt-2"} and not rig.drifts


async def test_a_ledger_that_fails_is_told_and_holds_nothing_up(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.ledger.execute("CREATE TRIGGER full BEFORE INSERT ON allocations BEGIN SELECT RAISE(ABORT, 'full'); END", ())
    rig.show("trainer=tt-1")
    await rig.polls(POLL_SECONDS)
    assert rig.held == {"tt-1"} and any("Who holds which device is not on record" in each for each in caplog.messages)


async def test_it_asks_time_and_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "POLL_SECONDS", 0.01)
    running = asyncio.create_task(rig.holdings.run())
    try:
        async with asyncio.timeout(30):
            rig.show("trainer=tt-1")
            while rig.held != {"tt-1"}:
                await asyncio.sleep(0.01)
            rig.kubelet.away = "Gone."
            while not rig.holdings.problem:
                await asyncio.sleep(0.01)
            rig.kubelet.away = ""
            while rig.holdings.problem:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.wait([running])


_steps = st.lists(
    st.tuples(st.sampled_from(["give", "poll", "away", "restart", "wait"]), st.sets(st.sampled_from("abcd"))),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(steps=_steps)
def test_nothing_in_use_is_ever_free_and_nothing_is_held_for_ever(
    steps: list[tuple[str, set[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def play() -> None:
        rig = Rig(tmp_path_factory.mktemp("node"))
        given: dict[str, float] = {}
        last: set[str] = set()
        for act, ids in steps:
            if act == "give" and ids:
                rig.give(*ids)
                given.update(dict.fromkeys(ids, rig.now))
            elif act == "poll":
                rig.show(*(f"pod-{id}={id}" for id in ids))
                await rig.polls(POLL_SECONDS)
                last = ids
            elif act == "away":
                rig.kubelet.away = "Away."
                await rig.polls(POLL_SECONDS)
                rig.kubelet.away = ""
            elif act == "restart":
                rig.restart()
            else:
                rig.now += GRACE_SECONDS
            recent = {id for id, at in given.items() if rig.now - at < GRACE_SECONDS}
            assert last | recent <= rig.held
            assert rig.held == rig.on_record()
        rig.show()
        await rig.polls(GRACE_SECONDS + MISSES * POLL_SECONDS)
        assert not rig.held and not rig.on_record()
        rig.ledger.close()

    asyncio.run(play())
