"""What the errors that NVIDIA's driver reports mean (XIDs), and for how long each counts against its GPU: for the
provider of NVIDIA's GPUs.

An error counts until there is evidence that the GPU is well again, and no longer; no restart of berth is needed:
- A reset ends all of a GPU's errors. It is seen by the GPU going and coming back, by its volatile ECC counters falling,
  or by the driver's recovery action going from something to none.
- While the driver names a recovery action, the GPU is unwell, whatever was reported.
- Without a reset, an error ends SETTLED_SECONDS after its last report where the driver says that nothing needs to be
  done, and QUIET_SECONDS after it where the driver does not say (before release 565). A GPU that fell off the bus
  (XID 79) comes back by a reset only.

Source: NVIDIA's Xid catalog, columns "immediate action", and the NVML reference on nvmlDeviceGpuRecoveryAction_t.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import IntEnum

from planning.devices.cards import Trouble

SETTLED_SECONDS = 60.0
QUIET_SECONDS = 600.0
# What applications do to themselves. The GPU is as good as before.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
DOUBLE_BIT_ECC = 0  # in the place of an XID: NVML tells these errors also by an event, and a counter, of their own
NO_ACTION = 0  # NVML_GPU_RECOVERY_ACTION_NONE


class Weight(IntEnum):
    """How much an error says of its GPU."""

    TOLD = 0  # people should know; the GPU can be used
    UNKNOWN = 1  # critical to the driver, and not in the table: counts when it is seen again
    RESET = 2  # nothing on the GPU is right before a reset
    LOST = 3  # the GPU is not there


@dataclass(frozen=True, slots=True)
class Xid:
    """What an XID says, a clause; and what to do, a sentence."""

    weight: Weight
    says: str
    do: str


RESET = "Drain the node, stop its berth pod and reset the GPU with nvidia-smi --gpu-reset, or restart the node."
REPLACE = "Restart the node; if it comes back, have the card looked at."
XIDS: dict[int, Xid] = {
    DOUBLE_BIT_ECC: Xid(Weight.RESET, "its memory has errors that cannot be corrected", RESET),
    46: Xid(Weight.RESET, "it stopped processing", RESET),
    48: Xid(Weight.RESET, "its memory has a double-bit error, which cannot be corrected", RESET),
    62: Xid(Weight.RESET, "its internal micro-controller halted", RESET),
    63: Xid(
        Weight.TOLD,
        "a bad page or row of its memory was recorded, and is replaced at the next reset",
        "Reset the GPU when its node is drained anyway.",
    ),
    64: Xid(
        Weight.RESET,
        "a bad page or row of its memory could not be recorded",
        f"{RESET} If it comes back, have the card replaced.",
    ),
    74: Xid(
        Weight.RESET,
        "an NVLink failed",
        f"{RESET} If it comes back, have the card, its seat and the links' other ends looked at.",
    ),
    79: Xid(
        Weight.LOST,
        "it fell off the bus",
        "Restart the node; if it comes back, have the card, its seat and its power looked at.",
    ),
    92: Xid(
        Weight.TOLD,
        "many single-bit errors of its memory are being corrected",
        "Watch it; if they go on, have the card looked at.",
    ),
    94: Xid(
        Weight.TOLD,
        "a memory error was contained: it ended the program that met it, and no other",
        "Reset the GPU when its node is drained anyway.",
    ),
    95: Xid(Weight.RESET, "a memory error was not contained: every program on it may be wrong", RESET),
    110: Xid(Weight.RESET, "it reported a security fault", RESET),
    119: Xid(Weight.RESET, "its system processor (GSP) does not answer", f"{RESET} A newer driver may help."),
    120: Xid(Weight.RESET, "its system processor (GSP) failed", f"{RESET} A newer driver may help."),
    121: Xid(Weight.TOLD, "its link to the CPU (C2C) had an error", "Reset the GPU when its node is drained anyway."),
    140: Xid(Weight.RESET, "its memory has errors that cannot be corrected, found late", RESET),
    143: Xid(Weight.RESET, "it does not initialise", REPLACE),
    154: Xid(Weight.TOLD, "what its driver asks to be done about it changed", "Look at the XID reported before."),
    155: Xid(Weight.RESET, "an NVLink failed", RESET),
    156: Xid(
        Weight.RESET,
        "a bad part of its memory was put aside, which needs a reset",
        f"{RESET} No other action is needed.",
    ),
    158: Xid(Weight.RESET, "a transaction of it timed out for good", RESET),
}
# NVML_GPU_RECOVERY_ACTION_*: reason, what the driver asks for.
ACTIONS: dict[int, tuple[str, str]] = {
    1: ("ResetRequired", f"The driver asks for a reset of this GPU. {RESET}"),
    2: ("RebootRequired", "The driver asks for a restart of the node. Drain it and restart it."),
    3: (
        "DrainRequired",
        "The driver asks that all programs end that use this GPU together with others. Drain the node; the driver then "
        "says what is next.",
    ),
    4: ("ResetRequired", f"The driver asks for a reset of this GPU after all its programs ended. {RESET}"),
    5: (
        "RecoveryRequired",
        "The driver asks for recovery of the IMEX domain. Restart nvidia-imex in the whole domain.",
    ),
    6: ("ResetRequired", "The driver asks for a reset of this GPU's bus. Drain the node and restart it."),
    7: (
        "RebootRequired",
        "The driver asks for a restart of the whole system. Drain it and restart it, baseboard included.",
    ),
}


@dataclass(slots=True)
class _Record:
    """Of one GPU or instance: the errors that count, each with the time of its last report; what was last heard."""

    errors: dict[int, float] = field(default_factory=dict)
    gone: bool = False
    action: int | None = None
    uncorrected: int | None = None


class Faults:
    """The errors of a node's GPUs that count now. `clock`: seconds, monotonic. Names are the ids of cards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def reported(self, card: str, xid: int) -> None:
        """The driver reports an XID, or DOUBLE_BIT_ECC."""
        if xid not in APPLICATION_XIDS:
            self._records.setdefault(card, _Record()).errors[xid] = self._clock()

    def lost(self, card: str) -> None:
        """The driver says that it is not there now; if it answers again, it was reset."""
        self._records.setdefault(card, _Record()).gone = True

    def listed(self, cards: Collection[str]) -> None:
        """Only these are on the node; what comes back later starts anew."""
        self._records = {card: record for card, record in self._records.items() if card in cards}

    def answered(self, card: str, action: int | None, uncorrected: int | None) -> None:
        """It answered a look: the driver's recovery action and its volatile count of uncorrected ECC errors, None where
        the driver does not tell. Evidence of a reset, or of errors, is taken from both.
        """
        record = self._records.setdefault(card, _Record())
        fell = _both(record.uncorrected, uncorrected) and (uncorrected or 0) < (record.uncorrected or 0)
        rose = _both(record.uncorrected, uncorrected) and (uncorrected or 0) > (record.uncorrected or 0)
        recovered = record.action not in (None, NO_ACTION) and action == NO_ACTION
        if record.gone or fell or recovered:
            record.errors.clear()
        elif rose:
            record.errors[DOUBLE_BIT_ECC] = self._clock()
        record.gone, record.uncorrected = False, uncorrected
        record.action = record.action if action is None else action
        now = self._clock()
        record.errors = {xid: at for xid, at in record.errors.items() if not _ended(xid, now - at, record.action)}

    def trouble(self, card: str) -> Trouble | None:
        """What speaks against it, the weightiest, last reported first; None if nothing does."""
        record = self._records.get(card)
        if record is None:
            return None
        action = ACTIONS.get(record.action, _STRANGE) if record.action else None
        counting = [(_weight(xid), at, xid) for xid, at in record.errors.items() if _weight(xid) != Weight.TOLD]
        if not counting:
            return Trouble(*action, sure=True) if action else None
        weight, _, xid = max(counting)
        asks = f" {action[1]}" if action else ""
        return Trouble(_reason(xid), _sentence(xid) + asks, sure=weight >= Weight.RESET or action is not None)

    def told(self, card: str) -> str:
        """What people should know of it although it can be used, sentences; '' if nothing."""
        record = self._records.get(card)
        errors = sorted(record.errors) if record else ()
        return " ".join(_sentence(xid) for xid in errors if _weight(xid) == Weight.TOLD)


def affects_all(xid: int) -> bool:
    """Whether an error of a MIG instance is one of the whole GPU."""
    return _weight(xid) >= Weight.RESET


_STRANGE = ("RecoveryRequired", f"The driver asks for an action that berth does not know. {RESET}")
_UNKNOWN = Xid(
    Weight.UNKNOWN,
    "the driver reports a critical error",
    "Look it up in NVIDIA's Xid catalog and the node's kernel log.",
)


def _both(before: int | None, now: int | None) -> bool:
    return before is not None and now is not None


def _weight(xid: int) -> Weight:
    return XIDS.get(xid, _UNKNOWN).weight


def _ended(xid: int, quiet: float, action: int | None) -> bool:
    if _weight(xid) == Weight.LOST or action not in (None, NO_ACTION):
        return False
    return quiet >= (QUIET_SECONDS if action is None else SETTLED_SECONDS)


def _reason(xid: int) -> str:
    return "DoubleBitEcc" if xid == DOUBLE_BIT_ECC else f"Xid{xid}"


def _sentence(xid: int) -> str:
    known = XIDS.get(xid, _UNKNOWN)
    name = "ECC" if xid == DOUBLE_BIT_ECC else f"XID {xid}"
    return f"{name}: {known.says}. {known.do}"
