"""Has Tenstorrent's cards reset before containers start with them, for the node process: each in a process of its own,
so that a driver that hangs costs that card alone, and nobody waits for it longer than a deadline.

A reset is never ended midway. One that takes too long goes on by itself, and whoever asks next waits for that one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nodeworkers.hardware.resetter import Outcome, outcome
from planning.devices.cards import Card, Sight, Trouble
from planning.devices.offers import Refused

SECONDS = 23.0  # for a start: the kubelet waits for 30, and the device plugin for 25
LOOK_SECONDS = 4.0  # of them for cards to be seen again: there is a look every two
RESET_SECONDS = 30.0  # that a card may take for its reset before it counts as ill
BACK_SECONDS = 10.0  # that it may then take until it is seen well
UNFIT_SECONDS = 300.0  # that one counts as ill whose reset failed midway; then it may be tried again
UNTOLD_SECONDS = 60.0  # for which a reset counts whose end nobody was told: the kubelet tries again before
_PAUSE = 0.05
_LAST_WORDS = 400  # characters
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Run:
    """One reset. `card` as it was before; `ended` is when its process was found ended, and `outcome` what came of it.
    `told`: somebody was told that it succeeded. `seen`: the card was seen well after it.
    """

    card: Card
    process: subprocess.Popen[bytes]
    began: float
    ended: float | None = None
    outcome: Outcome | None = None
    told: bool = False
    seen: bool = False


class Resets:
    """One node's. `reset` is called in threads, `shown` in the loop's."""

    def __init__(self, command: Callable[[Card], Sequence[str]], clock: Callable[[], float] = time.monotonic) -> None:
        """`command`: what starts the process that resets a card, as `resetter.command` makes it."""
        self._command, self._clock = command, clock
        self._runs: dict[str, _Run] = {}
        self._lock = threading.RLock()

    def reset(self, cards: Sequence[Card], seconds: float) -> Mapping[str, int]:
        """Resets cards that nobody holds, all at once, and returns the number that each has then, by id. Blocks for so
        many seconds at most. Raises Refused where a card is held, was not reset, or is still being.
        """
        until = self._clock() + seconds
        with self._lock:
            runs = [self._begun(card) for card in cards]
        late = [run.card.id for run in runs if not self._over(run, until - self._clock())]
        if late:
            raise Refused(
                f"{', '.join(late)} is still being reset after {seconds:.0f} s. The kubelet tries again, and then it "
                "is waited for; where that does not end, look into the node's kernel log."
            )
        if refused := list(filter(None, map(_refused, runs))):
            raise Refused(" ".join(refused))
        for run in runs:
            run.told = True
        return {run.card.id: run.outcome.number for run in runs if run.outcome and run.outcome.number is not None}

    def shown(self, sight: Sight) -> Sight:
        """What a look says, without what a card shows of itself because it is being reset: it is there then as it was.
        And with what comes of resets that fail.
        """
        if sight.vendor != "tenstorrent":
            return sight
        for id, run in list(self._runs.items()):
            self._over(run, 0.0)
            trouble = self._trouble(run)
            if trouble is not None:
                sight = replace(_as_before(sight, run.card), troubles={**sight.troubles, id: trouble})
            elif self._unseen(run):
                if _well(sight, run.card):
                    run.seen = run.ended is not None
                else:
                    sight = _as_before(sight, run.card)
                    sight = replace(sight, troubles={key: each for key, each in sight.troubles.items() if key != id})
        return sight

    def finish(self, seconds: float) -> None:
        """Waits for what goes on, so many seconds at most: with this process its container may end, and all in it."""
        until = self._clock() + seconds
        late = [run.card.id for run in list(self._runs.values()) if not self._over(run, until - self._clock())]
        if late:
            _log.warning("%s is still being reset while berth's process ends.", ", ".join(late))

    # ---- one reset

    def _begun(self, card: Card) -> _Run:
        """The card's reset that goes on, or that has ended not long ago and nobody was told or that failed midway; a
        new one otherwise. Raises Refused.
        """
        run = self._runs.get(card.id)
        if run is not None and (not self._over(run, 0.0) or self._trouble(run) or self._untold(run)):
            return run
        try:
            process = subprocess.Popen(
                self._command(card), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"}, cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Refused(f"{card.id} cannot be reset: {error.strerror or error}. Install berth anew.") from error
        self._runs[card.id] = run = _Run(card, process, self._clock())
        return run

    def _untold(self, run: _Run) -> bool:
        """Whether it has succeeded, and whoever asked for it may still ask again. Later that is somebody else, and the
        card may have been used meanwhile.
        """
        recent = run.ended is not None and self._clock() - run.ended < UNTOLD_SECONDS
        return recent and not run.told and not _refused(run)

    def _over(self, run: _Run, seconds: float) -> bool:
        """Whether it has ended, within so many seconds."""
        try:
            run.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return False
        with self._lock:
            if run.ended is None:
                run.outcome, run.ended = _outcome(run), self._clock()
                level = logging.INFO if run.outcome.number is not None else logging.WARNING
                _log.log(level, "%s", run.outcome.why or f"{run.card.id} was reset before a container starts with it.")
        return True

    def _trouble(self, run: _Run) -> Trouble | None:
        """What speaks against a card because of its reset."""
        now = self._clock()
        if run.ended is None:
            if now - run.began < RESET_SECONDS:
                return None
            why = f"It has been in its reset for more than {RESET_SECONDS:.0f} s. Look into the node's kernel log."
            return Trouble("ResetHangs", why, sure=True)
        midway = run.outcome is not None and run.outcome.begun
        if not (why := _refused(run)) or not midway or now - run.ended >= UNFIT_SECONDS:
            return None
        return Trouble("ResetFailed", why, sure=True)

    def _unseen(self, run: _Run) -> bool:
        """Whether what a look says of the card is likely to be of its reset."""
        if run.ended is None:
            return True
        return not _refused(run) and not run.seen and self._clock() - run.ended < BACK_SECONDS


def reset_for(cards: Sequence[Card], resets: Resets, written: Callable[[], Mapping[str, int]]) -> None:
    """Resets cards for a container that starts with them, and returns when it will get them under the numbers that they
    have by then: `written` are those of the CDI documents. Called in a thread. Raises Refused.
    """
    until = time.monotonic() + SECONDS
    numbers = resets.reset(cards, SECONDS - LOOK_SECONDS)
    while any(written().get(id) != number for id, number in numbers.items()):
        if time.monotonic() >= until:
            raise Refused(
                f"{', '.join(numbers)} was reset, and is not seen again yet. The kubelet tries again; see berth's log "
                "on this node."
            )
        time.sleep(_PAUSE)


def _refused(run: _Run) -> str:
    """Why a reset that has ended did not succeed; '' if it did."""
    return run.outcome.why if run.outcome is not None else ""


def _outcome(run: _Run) -> Outcome:
    """Of a process that has ended."""
    printed, words = (
        output.read() if output is not None else b"" for output in (run.process.stdout, run.process.stderr)
    )
    for output in (run.process.stdout, run.process.stderr):
        if output is not None:
            output.close()
    try:
        return outcome(printed)
    except ValueError:
        last = words.decode("utf-8", "replace").strip().rpartition("\n")[2][-_LAST_WORDS:]
        shown = "".join(each if each.isprintable() else " " for each in last).strip() or "it said nothing"
        why = f"{run.card.id} was not reset to its end: the process that did it ended with {run.process.returncode}"
        return Outcome(None, f"{why} ({shown}). Reset it with tt-smi -r.", begun=True)


def _well(sight: Sight, card: Card) -> bool:
    return card.id not in sight.troubles and any(each.id == card.id and each.nodes for each in sight.cards)


def _as_before(sight: Sight, card: Card) -> Sight:
    """With the card as it was where it is not to be seen now. It may be there under another id meanwhile."""
    if any(each.id == card.id and each.nodes for each in sight.cards):
        return sight
    others = tuple(each for each in sight.cards if each.id != card.id and each.address != card.address)
    return replace(sight, cards=(*others, card))
