"""What has happened so far, folded from what the API server's watches told: for the view, the report and benchmarks.

Pure: every method takes the moment (seconds on one clock) at which its news came. News may come late, twice or in any
order across kinds; a workload's Jobs are told apart by their attempt number, so none of that is counted twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "starting", "running", "closing", "succeeded", "failed"]
STATES: tuple[State, ...] = ("waiting", "starting", "running", "closing", "succeeded", "failed")
ENDED: frozenset[State] = frozenset({"succeeded", "failed"})

_RATE_WINDOW = 5.0
_NEWS = 200


@dataclass(slots=True)
class Item:
    """One workload. `applied`, `placed`, `ran` and `ended` are the first moments of each, None before.

    waiting: no Job of it exists; starting: a Job exists; running: its pod runs; closing: the pod ended and the status
    does not say so yet.
    """

    name: str
    gpus: int
    state: State = "waiting"
    attempt: int = -1
    retries: int = 0
    node: str = ""
    message: str = ""
    applied: float | None = None
    placed: float | None = None
    ran: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment. `used`: GPUs of live bound pods by model; `waiting` counts applied workloads only."""

    at: float
    counts: Mapping[State, int]
    used: Mapping[str, int]
    waiting: int

    @property
    def in_use(self) -> int:
        return sum(self.used.values())


@dataclass(frozen=True, slots=True)
class News:
    """A line for people: `kind` is placed, retried, done or failed."""

    at: float
    kind: str
    text: str


@dataclass(slots=True)
class _Pod:
    node: str
    gpus: int


@dataclass
class Fleet:
    """`models`: node name → (GPU model, GPUs). `items`: workload name → item."""

    models: Mapping[str, tuple[str, int]]
    items: dict[str, Item]
    samples: list[Sample] = field(default_factory=list)
    news: deque[News] = field(default_factory=lambda: deque(maxlen=_NEWS))
    overcommitted: int = 0  # how often a node was seen with more GPUs in use than it has

    @classmethod
    def of(cls, nodes: Iterable[tuple[str, str, int]], workloads: Iterable[tuple[str, int]]) -> Fleet:
        """`nodes`: (name, model, GPUs); `workloads`: (name, GPUs)."""
        return cls({name: (model, gpus) for name, model, gpus in nodes}, {n: Item(n, g) for n, g in workloads})

    def __post_init__(self) -> None:
        self.capacity: Counter[str] = Counter()
        for model, gpus in self.models.values():
            self.capacity[model] += gpus
        self._pods: dict[str, _Pod] = {}
        self._used_on: Counter[str] = Counter()
        self._placements: deque[float] = deque()
        self._ends: deque[float] = deque()
        self.placements = 0

    # ---- news

    def applied(self, name: str, at: float) -> None:
        """We sent it to the API server."""
        item = self.items[name]
        if item.applied is None:
            item.applied = at

    def job(self, name: str, attempt: int, node: str, at: float) -> None:
        """A Job of this attempt exists, pinned to a node."""
        item = self.items.get(name)
        if item is None or attempt <= item.attempt:
            return
        item.attempt, item.node = attempt, node
        if item.state not in ENDED:
            item.state = "starting"
        self.placements += 1
        self._placements.append(at)
        if item.placed is None:
            item.placed = at
        model = self.models.get(node, ("?", 0))[0]
        again = f", attempt {attempt + 1}" if attempt else ""
        self.news.append(News(at, "placed", f"{name} placed on {node} ({item.gpus} × {model}){again}"))

    def job_gone(self, name: str, attempt: int, at: float) -> None:
        """The Job of this attempt was deleted: the workload waits again, unless it ended."""
        item = self.items.get(name)
        if item is not None and attempt == item.attempt and item.state not in ENDED:
            item.state = "waiting"

    def pod(self, uid: str, name: str, attempt: int, node: str, running: bool, at: float) -> None:
        """A live pod as it is now; `node` is '' until it is bound."""
        item = self.items.get(name)
        if item is None:
            return
        if node and uid not in self._pods:
            self._pods[uid] = _Pod(node, item.gpus)
            self._used_on[node] += item.gpus
            if self._used_on[node] > self.models.get(node, ("", 0))[1]:
                self.overcommitted += 1
        self.job(name, attempt, node or item.node, at)
        if running and attempt == item.attempt and item.state == "starting":
            item.state = "running"
            if item.ran is None:
                item.ran = at

    def pod_gone(self, uid: str, name: str, attempt: int, at: float) -> None:
        """A pod ended or was removed: its GPUs are free."""
        pod = self._pods.pop(uid, None)
        if pod is not None:
            self._used_on[pod.node] -= pod.gpus
        item = self.items.get(name)
        if item is not None and attempt == item.attempt and item.state in ("starting", "running"):
            item.state = "closing"

    def status(self, name: str, phase: str, retries: int, message: str, at: float) -> None:
        """What berth reports in the workload's status."""
        item = self.items.get(name)
        if item is None:
            return
        if retries > item.retries:
            item.retries = retries
            if phase not in ("Succeeded", "Failed"):
                self.news.append(News(at, "retried", f"{name}: {message}"))
        item.message = message
        ended: dict[str, State] = {"Succeeded": "succeeded", "Failed": "failed"}
        if phase in ended and item.state not in ENDED:
            item.state = ended[phase]
            item.ended = at
            self._ends.append(at)
            self.news.append(News(at, "done" if phase == "Succeeded" else "failed", f"{name}: {message or phase}"))

    # ---- figures

    def sample(self, at: float) -> Sample:
        """The fleet now; kept for the curves."""
        taken = Sample(
            at,
            Counter(item.state for item in self.items.values()),
            self.used(),
            sum(item.state == "waiting" and item.applied is not None for item in self.items.values()),
        )
        self.samples.append(taken)
        return taken

    def used(self) -> Counter[str]:
        """GPUs in use by model."""
        used: Counter[str] = Counter()
        for node, gpus in self._used_on.items():
            used[self.models.get(node, ("?", 0))[0]] += gpus
        return used

    @property
    def total(self) -> int:
        return sum(self.capacity.values())

    @property
    def all_ended(self) -> bool:
        return all(item.state in ENDED for item in self.items.values())

    def rates(self, now: float) -> tuple[float, float]:
        """Placements and ends per second over the last five seconds."""
        result = []
        for moments in (self._placements, self._ends):
            while moments and moments[0] < now - _RATE_WINDOW:
                moments.popleft()
            result.append(len(moments) / _RATE_WINDOW)
        return result[0], result[1]
