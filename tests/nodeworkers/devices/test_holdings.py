"""Who holds which device: never free while somebody has it, never held for ever, and where the kubelet and the record
disagree somebody is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeworkers.devices import holdings as holdings_module
from nodeworkers.devices.holdings import (
    GRACE_SECONDS,
    MISSES,
    POLL_SECONDS,
    Claimed,
    Drift,
    Holder,
    Holding,
    Holdings,
    Listed,
    PodResourcesError,
)
from nodeworkers.devices.records import Records
from nodeworkers.ledger import Ledger

N150 = "tenstorrent.com/n150"


class Kubelet:
    """A podresources service that shows what a test says, or is away."""

    def __init__(self) -> None:
        self.shown: list[Holding] = []
        self.claimed: list[Claimed] = []
        self.knows = True
        self.kept: set[str] | None = set()
        self.away = ""
        self.hangs = False

    async def pods(self) -> Listed:
        if self.hangs:
            await asyncio.Event().wait()
        if self.away:
            raise PodResourcesError(self.away)
        return Listed(tuple(self.shown), tuple(self.claimed), self.knows)


class Rig:
    """Holdings over a ledger, beside a kubelet, with a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.kubelet = Kubelet()
        self.drifts: list[Drift] = []
        self.prepared: set[str] = set()
        self.ledger = Ledger(folder)
        self.folder = folder
        self.start()

    def start(self) -> None:
        self.records = Records(self.ledger)
        self.holdings = Holdings(
            self.kubelet, self.records, lambda resource: resource.startswith("tenstorrent.com/"), self.drifts.append,
            lambda: self.now, lambda: 1.7e9 + self.now, kept=lambda: self.kubelet.kept,
            by_name=lambda name: (name.replace("named-", "tt-"), N150) if name.startswith("named-") else None,
            prepared=self.prepared.__contains__,
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

    async def give_meanwhile() -> Listed:
        rig.now += 1
        rig.give("tt-1")
        return Listed(knows=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rig.kubelet, "pods", give_meanwhile)
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
    assert caplog.messages.count("The kubelet does not answer. What was known before still holds.") == 1
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


async def test_a_kubelet_that_cannot_know_its_pods_yet_frees_nothing_that_its_files_have(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.give("tt-1", "tt-2")
    rig.show("trainer=tt-1,tt-2")
    await rig.polls(120)
    # It is started while the API server is away: its list is empty, its checkpoint is not.
    rig.holdings.kubelet_restarted()
    rig.show()
    rig.kubelet.knows, rig.kubelet.kept = False, {"tt-1"}
    await rig.polls(POLL_SECONDS)
    assert rig.held == {"tt-1", "tt-2"}
    await rig.polls(3600)
    assert rig.held == rig.on_record() == {"tt-1"}, "what its files lack as well is free"
    assert sum("does not know its pods" in each for each in caplog.messages) == 1
    rig.show("static=tt-1")
    await rig.polls(POLL_SECONDS)
    rig.show()
    # Now the API server is back, and the kubelet takes in its pods one after the other.
    rig.kubelet.knows = True
    await rig.polls(GRACE_SECONDS - POLL_SECONDS)
    assert rig.held == {"tt-1"}
    rig.show("trainer=tt-1")
    await rig.polls(120)
    assert rig.held == {"tt-1"}
    rig.show()
    rig.kubelet.knows = False
    await rig.polls(POLL_SECONDS * MISSES)
    assert not rig.held, "who knew its pods knows that there is none any more"


@pytest.mark.parametrize("restart", ["kubelet", "node", "both", "away"])
async def test_where_a_kubelets_files_do_not_tell_all_stays_until_it_knows_its_pods(rig: Rig, restart: str) -> None:
    rig.give("tt-1")
    rig.show("trainer=tt-1")
    await rig.polls(120)
    if restart in ("node", "both"):
        rig.restart()
    if restart in ("kubelet", "both"):
        rig.holdings.kubelet_restarted()
    if restart == "away":
        rig.kubelet.away = "Away."
        await rig.polls(POLL_SECONDS)
        rig.kubelet.away = ""
    rig.show()
    rig.kubelet.knows, rig.kubelet.kept = False, None
    await rig.polls(3600)
    assert rig.held == {"tt-1"}
    rig.kubelet.knows = True
    await rig.polls(GRACE_SECONDS + POLL_SECONDS)
    assert not rig.held and not rig.on_record()


async def test_a_claim_that_is_on_no_record_is_held_by_what_the_kubelet_lists(rig: Rig) -> None:
    rig.kubelet.claimed = [
        Claimed("team-a", "trainer", "main", "named-1", "c-1"), Claimed("team-a", "trainer", "main", "named-2", "c-1"),
        Claimed("team-a", "watcher", "main", "named-3", "c-2"), Claimed("team-a", "old", "main", "named-4"),
        Claimed("team-a", "other", "main", "unknown", "c-3"),
    ]  # fmt: skip
    rig.prepared.add("c-2")  # to look at it, whoever has it
    await rig.polls(POLL_SECONDS)
    assert rig.held == rig.on_record() == {"tt-1", "tt-2", "tt-4"}
    assert {each.device_id for each in rig.drifts if each.kind == "NotGiven"} == rig.held
    assert "tt-1 (tenstorrent.com/n150) by the claim c-1, and this node has no record" in rig.drifts[0].message
    rig.restart()
    await rig.polls(POLL_SECONDS)
    assert rig.held == {"tt-1", "tt-2", "tt-4"} and len(rig.drifts) == 3, "it is on record now"
    assert rig.holdings.held["tt-1"] == Holder(N150, "team-a", "trainer", ("main",), "c-1", shown=True)
    # It is given back while the kubelet makes its list: that is not held anew.
    rig.records.forget(["tt-1", "tt-2"], "c-1")
    rig.holdings.released("c-1")
    await rig.polls(POLL_SECONDS)
    assert rig.held == {"tt-4"}
    rig.kubelet.claimed = []
    await rig.polls(GRACE_SECONDS + POLL_SECONDS)
    assert not rig.held and not rig.on_record()
    # A claim may be prepared again.
    rig.give("tt-1", claim="c-1")
    assert rig.held == {"tt-1"}


async def test_a_kubelet_that_hangs_is_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings_module, "_ANSWER_SECONDS", 0.05)
    rig.give("tt-1")
    rig.kubelet.hangs = True
    await rig.holdings.look()
    assert rig.holdings.problem == "The kubelet did not say within 0.05 s who holds which device."
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
