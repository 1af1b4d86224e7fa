"""Makes work that comes and goes out of a trace: as much as keeps a given share of a fleet's GPUs busy.

What was recorded hardly fills the fleet, and a few runs of months make up half of it. So a simulation begins with what
would be there long after such work began to come; then stretches of the trace come in turn, drawn by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from berth.simulate.trace import Recorded
from planning.orders import Submission

# Pods in a row that are drawn together: whoever submits many alike does so at once, and they compete for the same room.
_STRETCH = 50
# Fewer arrivals than this tell nothing about the slowest hundredth.
_LEAST = 1000
# Of all pauses between arrivals, the longest hundredth count as the next longest: openb lists some pods that were there
# when its record began, days apart.
_PAUSES = 0.99


@dataclass(frozen=True, slots=True)
class Load:
    """Submissions in the order in which they come. Measured are those that come from `begin` until `end`, in seconds;
    the others are there before them, or come after them as long as one of them may wait.
    """

    submissions: tuple[Submission, ...]
    begin: float
    end: float


def offered(pods: Sequence[Recorded], gpu_milli: int, load: float, seed: int) -> Load:
    """`load`: GPUs that are asked for times the seconds that they are held, as a share of the fleet's, on average."""
    draw = Random(seed)
    work = sum(pod.arrival.gpu_milli * pod.seconds for pod in pods) / len(pods)
    pause = work / (load * gpu_milli)
    standing = _standing(pods, round(sum(pod.seconds for pod in pods) / len(pods) / max(pause, work / gpu_milli)), draw)
    count = max(len(pods), _LEAST)
    come: list[Submission] = []
    moments: list[float] = []
    for pod, after in _drawn(pods, pause, draw):
        at = moments[-1] if moments else 0.0
        come.append(Submission(pod.arrival.name, pod.tenant, pod.arrival.shape, at, pod.seconds))
        moments.append(at + after)
        if len(come) == 5 * count // 2:
            break
    # A half to settle, as many as there are to be measured, and as many again to come after them.
    return Load((*standing, *come), come[count // 2].at, come[3 * count // 2].at)


def _standing(pods: Sequence[Recorded], count: int, draw: Random) -> Iterator[Submission]:
    """What is there at a moment of which nothing is known: of each kind as many as come while one of it runs, and each
    somewhere in its run. The oldest is the first.
    """
    chosen = draw.choices(pods, weights=[pod.seconds for pod in pods], k=count)
    aged = sorted(((pod.seconds * draw.random(), number) for number, pod in enumerate(chosen)), reverse=True)
    for ran, number in aged:
        pod = chosen[number]
        yield Submission(pod.arrival.name, pod.tenant, pod.arrival.shape, 0.0, pod.seconds - ran, ran)


def _drawn(pods: Sequence[Recorded], mean: float, draw: Random) -> Iterator[tuple[Recorded, float]]:
    """Stretches of the trace without an end, each pod with the pause after it; pauses are `mean` seconds on average."""
    pauses = [after.created - before.created for before, after in pairwise(pods)] or [0.0]
    longest = sorted(pauses)[int(_PAUSES * (len(pauses) - 1))]
    pauses = [min(pause, longest) for pause in pauses]
    average = sum(pauses) / len(pauses)
    if not average:
        pauses, average = [1.0] * len(pauses), 1.0
    pauses.append(average)  # after the last one, whose next is the first
    while True:
        begin = draw.randrange(len(pods))
        for number in range(begin, begin + _STRETCH):
            yield pods[number % len(pods)], pauses[number % len(pods)] / average * mean
