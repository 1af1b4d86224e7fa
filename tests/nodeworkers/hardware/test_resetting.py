"""Cards are reset before containers start with them, and never one that somebody holds; a reset that fails or hangs
costs its card alone. Processes are the real ones, over the tree of a simulated machine.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeworkers.hardware import resetter, resetting
from nodeworkers.hardware.machine_tenstorrent import Simulation, TenstorrentMachine, read_simulated
from nodeworkers.hardware.resetter import Outcome, outcome
from nodeworkers.hardware.resetting import BACK_SECONDS, RESET_SECONDS, UNFIT_SECONDS, UNTOLD_SECONDS, Resets, reset_for
from nodeworkers.hardware.tenstorrent import Tenstorrent
from planning.devices.cards import Card, Sight, Trouble
from planning.devices.offers import Refused

DEADLINE = 60.0
NODES = ("/dev/tenstorrent/0",)
CARD = Card("tt-1", "tenstorrent", "n150", "tenstorrent.com/n150", 0, "0000:01:00.0", nodes=NODES, driver="2.10.0")
OTHER = replace(CARD, id="tt-2", index=1, address="0000:02:00.0", nodes=("/dev/tenstorrent/1",))
SIGHT = Sight("tenstorrent", (CARD, OTHER))
DETACHED = Trouble("Detached", "It is gone.", sure=True)


class Machine:
    """A simulated one, and its cards as their provider sees them."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.simulation: Simulation | None = None
        self.resets = Resets(lambda card: resetter.command(card, tree))

    def have(self, *cards: Mapping[str, Any], driver: str = "2.10.1") -> tuple[Card, ...]:
        machine = TenstorrentMachine.model_validate(
            {"driver": driver, "cards": [{"type": "n150", **card} for card in cards]}
        )
        if self.simulation is None:
            self.simulation = Simulation(self.tree, machine)
        else:
            self.simulation.apply(machine)
        tree = self.tree
        return Tenstorrent(tree / "sys", tree / "dev", tree / "proc", read_simulated).look().cards


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for run in made.resets._runs.values():
        run.process.kill()
        run.process.communicate()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- with the real process -----------------------------------------------------------------------------------------


def test_cards_that_nobody_holds_are_reset_all_at_once(machine: Machine) -> None:
    cards = machine.have({}, {"index": 7})
    assert machine.resets.reset(cards, DEADLINE) == {cards[0].id: 0, cards[1].id: 7}
    first = {run.process.pid for run in machine.resets._runs.values()}
    assert machine.resets.reset(cards, DEADLINE), "and again for the next container"
    assert len(first | {run.process.pid for run in machine.resets._runs.values()}) == 4


def test_one_that_a_process_holds_is_left_alone_and_so_is_one_whose_driver_cannot_tell(machine: Machine) -> None:
    (held,) = machine.have({"pids": [4711]})
    with pytest.raises(Refused, match=f"^{held.id} is not reset: a process holds it .* End it.$"):
        machine.resets.reset([held], DEADLINE)
    assert machine.resets.shown(SIGHT) == SIGHT, "it is as well as it was"
    (free,) = machine.have({})
    assert machine.resets.reset([free], DEADLINE)
    (old,) = machine.have({}, driver="2.9.0")
    with pytest.raises(Refused, match=r"cannot prove that nobody holds it. Update tt-kmd to 2\.10 or newer\.$"):
        machine.resets.reset([old], DEADLINE)


def test_two_processes_do_not_reset_one_card(machine: Machine) -> None:
    """As when berth was started anew while a reset goes on."""
    (card,) = machine.have({"reset": "hangs"})
    with pytest.raises(Refused, match="is still being reset"):
        machine.resets.reset([card], 0.0)
    first = machine.resets._runs[card.id].process
    until(lambda: _opened(first.pid, machine.tree))
    with pytest.raises(Refused, match="a process holds it"):
        Resets(lambda card: resetter.command(card, machine.tree)).reset([card], DEADLINE)
    assert first.poll() is None


def _opened(pid: int, tree: Path) -> bool:
    try:
        links = [each.readlink() for each in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(tree.resolve() in link.parents for link in links)


def test_one_that_fails_midway_is_told_and_the_others_go_on(machine: Machine) -> None:
    bad, good = machine.have({"reset": "fails"}, {})
    with pytest.raises(Refused, match=f"^{bad.id} has reset itself but does not start again .*tt-smi -r"):
        machine.resets.reset([bad, good], DEADLINE)
    sight = Sight("tenstorrent", (bad, good))
    shown = machine.resets.shown(sight)
    assert shown.troubles[bad.id].reason == "ResetFailed" and shown.troubles[bad.id].sure
    process = machine.resets._runs[good.id].process
    assert good.id not in shown.troubles and machine.resets.reset([good], DEADLINE)
    assert machine.resets._runs[good.id].process is process, "and need not be reset again"


def test_one_that_hangs_holds_up_nobody_else_and_is_waited_for_by_the_next(machine: Machine) -> None:
    hanging, good = machine.have({"reset": "hangs"}, {})
    with pytest.raises(Refused, match=f"^{hanging.id} is still being reset after 0 s. The kubelet tries again"):
        machine.resets.reset([hanging], 0.3)
    process = machine.resets._runs[hanging.id].process
    assert machine.resets.reset([good], DEADLINE) == {good.id: 1}
    assert process.poll() is None, "nobody ends it midway"
    machine.have({}, {})
    assert machine.resets.reset([hanging], DEADLINE) == {hanging.id: 0}
    assert machine.resets._runs[hanging.id].process is process, "and it is not begun twice"


def test_one_whose_end_nobody_waited_for_is_not_reset_twice(machine: Machine) -> None:
    (card,) = machine.have({"reset": "hangs"})
    with pytest.raises(Refused):
        machine.resets.reset([card], 0.0)
    process = machine.resets._runs[card.id].process
    machine.have({})
    until(lambda: process.poll() is not None)
    assert machine.resets.reset([card], 0.0) == {card.id: 0} and machine.resets._runs[card.id].process is process


def test_those_who_ask_at_once_wait_for_one_reset(machine: Machine) -> None:
    (card,) = machine.have({})
    found: list[Mapping[str, int]] = []
    threads = [threading.Thread(target=lambda: found.append(machine.resets.reset([card], DEADLINE))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert found == [{card.id: 0}] * 3


# --- what looks show meanwhile -------------------------------------------------------------------------------------


class Played:
    """Resets whose processes a test ends with what it says, at times that it says."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 100.0, folder
        self.resets = Resets(self.command, lambda: self.now)

    def command(self, card: Card) -> list[str]:
        wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        said = "sys.stdout.write(open(sys.argv[1]).read()); sys.exit(sys.stdout.flush())"
        return [sys.executable, "-I", "-c", wait + said, str(self.folder / card.id)]

    def begin(self, card: Card = CARD) -> None:
        with pytest.raises(Refused, match="still being reset"):
            self.resets.reset([card], 0.0)

    def end(self, told: Outcome | str, card: Card = CARD) -> None:
        text = told if isinstance(told, str) else orjson.dumps(told).decode()
        (self.folder / f".{card.id}").write_text(text)
        (self.folder / f".{card.id}").rename(self.folder / card.id)
        self.resets._runs[card.id].process.wait(DEADLINE)


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    made = Played(tmp_path)
    yield made
    for run in made.resets._runs.values():
        run.process.kill()
        run.process.communicate()


GONE = Sight("tenstorrent", (OTHER,))
NAMELESS = replace(CARD, id="tt-0000-01-00-0", nodes=())
LOOKS = [
    replace(SIGHT, troubles={"tt-1": DETACHED}),
    GONE,
    replace(SIGHT, cards=(NAMELESS, OTHER), troubles={NAMELESS.id: DETACHED}),
    replace(SIGHT, cards=(replace(CARD, nodes=()), OTHER), troubles={"tt-1": DETACHED}),
]


@pytest.mark.parametrize("look", LOOKS)
def test_what_a_card_shows_of_its_own_reset_is_no_trouble(played: Played, look: Sight) -> None:
    assert played.resets.shown(look) == look
    played.begin()
    for after in (0.0, RESET_SECONDS - 1):
        played.now = 100 + after
        shown = played.resets.shown(look)
        assert CARD in shown.cards and OTHER in shown.cards and "tt-1" not in shown.troubles
        assert not any(each.id == NAMELESS.id for each in shown.cards)
    played.end(Outcome(4, begun=True))
    assert "tt-1" not in played.resets.shown(look).troubles, "the look may have begun before"
    back = replace(SIGHT, cards=(replace(CARD, index=4), OTHER))
    assert played.resets.shown(back) == back, "it has another number"
    assert played.resets.shown(look) == look, "from now on it is what it shows"


def test_trouble_of_other_cards_is_trouble(played: Played) -> None:
    played.begin()
    shown = played.resets.shown(replace(SIGHT, troubles={"tt-1": DETACHED, "tt-2": DETACHED}))
    assert shown.troubles == {"tt-2": DETACHED}
    others = Sight("nvidia", (replace(CARD, vendor="nvidia"),), {"tt-1": DETACHED})
    assert played.resets.shown(others) == others


def test_one_that_takes_too_long_is_ill_until_it_ends(played: Played) -> None:
    played.begin()
    played.now += RESET_SECONDS
    shown = played.resets.shown(GONE)
    assert shown.troubles["tt-1"].reason == "ResetHangs" and CARD in shown.cards
    played.end(Outcome(0, begun=True))
    assert played.resets.shown(SIGHT) == SIGHT


def test_one_that_is_not_seen_well_again_is_what_it_shows(played: Played) -> None:
    played.begin()
    played.end(Outcome(0, begun=True))
    assert CARD in played.resets.shown(GONE).cards
    played.now += BACK_SECONDS
    assert played.resets.shown(GONE) == GONE


def test_one_that_failed_is_ill_for_a_while_and_then_it_may_be_tried_again(played: Played) -> None:
    played.begin()
    played.end(Outcome(None, "tt-1 has not come back.", begun=True))
    assert played.resets.shown(SIGHT).troubles["tt-1"].message == "tt-1 has not come back."
    process = played.resets._runs["tt-1"].process
    with pytest.raises(Refused, match="has not come back"):
        played.resets.reset([CARD], DEADLINE)
    assert played.resets._runs["tt-1"].process is process, "it is left alone until then"
    played.now += UNFIT_SECONDS
    assert played.resets.shown(SIGHT) == SIGHT
    with pytest.raises(Refused, match="has not come back"):
        played.resets.reset([CARD], DEADLINE)
    assert played.resets._runs["tt-1"].process is not process


@pytest.mark.parametrize(("after", "anew"), [(UNTOLD_SECONDS - 1, False), (UNTOLD_SECONDS, True)])
def test_one_whose_end_nobody_was_told_counts_for_a_while(played: Played, after: float, anew: bool) -> None:
    """Later its card may have been used without this process."""
    played.begin()
    played.end(Outcome(0, begun=True))
    played.resets.shown(SIGHT)
    process = played.resets._runs["tt-1"].process
    played.now += after
    assert played.resets.reset([CARD], DEADLINE) == {"tt-1": 0}
    assert (played.resets._runs["tt-1"].process is not process) == anew


@pytest.mark.parametrize("said", ["", "Traceback", "[]", '{"number": -1, "why": "", "begun": true}', '{"number": 1}'])
def test_a_process_that_ends_without_a_word_may_have_left_a_card_midway(played: Played, said: str) -> None:
    played.begin()
    played.end(said)
    trouble = played.resets.shown(SIGHT).troubles["tt-1"]
    assert trouble.message.startswith("tt-1 was not reset to its end: the process that did it ended with 0 (")
    with pytest.raises(Refused, match="was not reset to its end"):
        played.resets.reset([CARD], DEADLINE)


def test_a_process_that_cannot_be_started_is_a_sentence() -> None:
    with pytest.raises(Refused, match=r"^tt-1 cannot be reset: No such file or directory\. Install berth anew\.$"):
        Resets(lambda card: ["/nowhere/python"]).reset([CARD], 1.0)


def test_what_goes_on_is_waited_for_when_the_process_ends(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    played.resets.finish(DEADLINE)
    played.begin()
    played.resets.finish(0.0)
    assert "tt-1 is still being reset while berth's process ends" in caplog.text
    caplog.clear()
    waiting = threading.Thread(target=lambda: played.resets.finish(DEADLINE))
    waiting.start()
    played.end(Outcome(0, begun=True))
    waiting.join(DEADLINE)
    assert not waiting.is_alive() and "still" not in caplog.text


# --- until a container gets it -------------------------------------------------------------------------------------


def test_a_container_starts_when_its_cards_are_known_by_their_new_numbers(played: Played) -> None:
    asked: list[int] = []
    (played.folder / "tt-1").write_text(orjson.dumps(Outcome(4, begun=True)).decode())
    played.resets = Resets(played.command)

    def written() -> Mapping[str, int]:
        asked.append(len(asked))
        return {"tt-1": 0 if len(asked) < 4 else 4}

    reset_for([CARD], played.resets, written)
    assert len(asked) == 4


def test_a_card_that_nobody_sees_after_its_reset_is_given_to_no_container(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.begin()
    played.end(Outcome(4, begun=True))
    monkeypatch.setattr(resetting, "SECONDS", 0.2)
    monkeypatch.setattr(resetting, "LOOK_SECONDS", 0.2)
    with pytest.raises(Refused, match=r"^tt-1 was reset, and is not seen again yet\."):
        reset_for([CARD], played.resets, lambda: {"tt-1": 0})


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["number", "why", "begun"]), inner),
    max_leaves=6,
)


@given(st.binary(max_size=80) | _json.map(orjson.dumps))
def test_whatever_the_process_says_is_an_outcome_or_none(printed: bytes) -> None:
    try:
        found = outcome(printed)
    except ValueError:
        return
    assert (found.number is None) == bool(found.why) and found.number is not True
