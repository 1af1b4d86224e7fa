"""The values that planning works on: what the cluster looks like and what was decided about it.

Views are small, frozen projections of Kubernetes objects (`planning.views` makes them); decisions are what the
planner returns and histories record. Units: CPU in millicores, memory in bytes, GPUs in whole devices, times in
seconds since the epoch (UTC).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from crds.gpuquota import GPUQuotaSpec
from crds.gpuworkload import GPUWorkloadSpec
from planning.resources import WHOLE as WHOLE
from planning.resources import Devices as Devices
from planning.resources import Gap as Gap
from planning.resources import NodeView as NodeView
from planning.resources import Resources as Resources
from planning.resources import Taint as Taint

if TYPE_CHECKING:
    from planning.caches.warmth import Warm
    from planning.profiles import Profile
    from planning.windows import ReservationView

Places = tuple[tuple[str, int], ...]
"""Nodes and how many of a gang's pods each gets, in the order of the pods' indices; none for a single pod."""

# The label by which NVIDIA's feature discovery, and traces, tell a node's GPU model.
GPU_MODEL_LABEL = "nvidia.com/gpu.product"
# Terminal phases (law 1): nothing happens to a workload that has one.
TOMBSTONES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class PodView:
    """A live pod (neither Succeeded nor Failed; a terminating one is live). `node` is '' until it is bound."""

    uid: str
    namespace: str
    name: str
    resource_version: int
    node: str
    requests: Resources
    workload_uid: str = ""
    job_name: str = ""
    terminating: bool = False
    gone_by: float | None = None  # of a terminating one: when its grace period ends
    running: bool = False
    blocked: str = ""  # why the kube-scheduler could not bind it, in its words
    index: int = -1  # which of its Job's pods it is; -1 unless they are numbered
    gated: bool = False  # the kube-scheduler leaves it alone until berth has told it its node
    prefers: str = ""  # the group of GPUs on which it would have its seat


@dataclass(frozen=True, slots=True)
class JobView:
    """A Job that berth made. `finished` is '', 'Complete' or 'Failed'; `reason` and `message` are the Job's own.

    A gang's has `places`, of which `node` is the first. It is `ready` once all its pods are, or have ended well.
    `created`: when this turn's run was asked for, so of a `resumed` one when it was let go on.
    """

    uid: str
    namespace: str
    name: str
    resource_version: int
    workload_uid: str
    attempt: int
    retries: int
    node: str
    requests: Resources
    created: float
    started: float | None = None
    ready: bool = False
    finished: str = ""
    finished_at: float | None = None
    reason: str = ""
    message: str = ""
    deleting: bool = False
    active_deadline: int | None = None
    counted: bool = False  # the Job controller counted a pod of it, once or now
    strategy: str = ""
    spec_hash: str = ""  # of the spec that it was made from; '' for a Job of an older build
    withdrawn: bool = False  # the ledger marked it before it took it back; nobody else's deletion looks like this
    suspended: bool = False  # by whomever: no pods are made for it
    preempted: bool = False  # the ledger suspended it so that others get its place
    halted: bool = False  # and its controller has seen to that: it counts no pod any more
    resumed: bool = False  # it was stopped in an earlier turn, and goes on in this one
    backfill: float | None = None  # it was given what is kept for somebody: until when it may keep it (0: on demand)
    places: Places = ()
    done: frozenset[int] = frozenset()  # of a gang: the indices of those that have ended well
    missing: int = 0  # of a gang: pods that the Job controller has yet to create; 0 once one has failed
    lent: bool = False  # it was given what is reserved, since it could be stopped: an edit of that changes nothing


@dataclass(frozen=True, slots=True)
class Ended:
    """What a tombstone tells of its workload's last run. `told`: when the end was written, `reason` what it was called.

    Only what is learned from it (`planning.profiles`); nothing is decided about the workload by it.
    """

    told: float
    finished: float
    started: float | None = None
    reason: str = ""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """A GPUWorkload. `spec` is None when the models refuse it; `invalid` then says where and why, for a person.

    `status` is kept only to avoid writing what already stands there and to know tombstones (law 1). `ended` is None
    unless it is one.
    """

    uid: str
    namespace: str
    name: str
    resource_version: int
    generation: int
    created: float
    spec: GPUWorkloadSpec | None
    invalid: str = ""
    deleting: bool = False
    finalizer: bool = False
    other_finalizers: tuple[str, ...] = ()
    status: Mapping[str, Any] = field(default_factory=dict)
    ended: Ended | None = None

    # Known from its status once: a round asks every workload for them many times.
    phase: str = field(init=False, compare=False, repr=False)
    finished: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", str(self.status.get("phase", "")))
        object.__setattr__(self, "finished", self.phase in TOMBSTONES)


@dataclass(frozen=True, slots=True)
class QuotaView:
    """A GPUQuota. `spec` is None when the models refuse it; `invalid` then says where and why, for a person."""

    name: str
    uid: str
    resource_version: int
    generation: int
    created: float
    spec: GPUQuotaSpec | None
    invalid: str = ""
    status: Mapping[str, Any] = field(default_factory=dict)


# How far an autoscaler is with a ProvisioningRequest: not made yet, made, taken up, room found.
Stage = Literal["", "ordered", "accepted", "provisioned"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """A ProvisioningRequest of berth's. The moments and messages are None while their condition is not True."""

    name: str
    uid: str
    attempt: int
    generation: int  # of the workload that it was made for
    class_name: str
    created: float
    deleting: bool = False
    accepted: float | None = None
    provisioned: float | None = None
    failed: str | None = None
    expired: str | None = None
    revoked: str | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """Where a strategy's name comes from when the workload names none: its namespace, then the installation."""

    strategy: str
    namespace_strategies: Mapping[str, str] = field(default_factory=dict)


# --- what the ledger remembers, because the cluster cannot tell it ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """Which Job of a workload comes next: `attempt` numbers its Jobs, `retries` counts those that a failure cost."""

    attempt: int = 0
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Booking:
    """What an autoscaler keeps for a workload's pod, which must name both."""

    request: str  # the name of a ProvisioningRequest
    class_name: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """A Job that was stopped, as it was seen then."""

    name: str
    uid: str
    version: int


@dataclass(frozen=True, slots=True)
class Warmth:
    """Of a workload's kernel caches, how many are Ready where it was placed (of a gang's nodes, on the one with the
    fewest), and the most that are on any one node.
    """

    caches: int
    ready: int
    most: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """One promise of GPUs: this workload's next Job goes to this node, or a gang's pods to these `places`, of which
    `node` is the first. `requests` are one pod's. `resumes`: the stopped Job that goes on there, if the API server lets
    it; else the Job `job_name` takes its place.
    """

    uid: str
    namespace: str
    name: str
    generation: int
    resource_version: int
    turn: Turn
    node: str
    requests: Resources
    strategy: str
    job_name: str
    backfill: float | None = None  # what it gets is kept for somebody else: until when it may have it (0: on demand)
    places: Places = ()
    booking: Booking | None = None
    lent: bool = False  # what it gets is reserved: those of the GPUReservation may have it back at any time
    resumes: Stopped | None = None
    warmth: Warmth | None = None  # None: its pods mount no kernel caches, or these did not matter

    @property
    def job_names(self) -> tuple[str, ...]:
        """Under which its Job may be found."""
        return (self.job_name,) if self.resumes is None else (self.resumes.name, self.job_name)


# Nodes remembered for a workload: enough for the usual cause (a zone, a kind of node), small in every history.
AVOIDED_NODES = 8


@dataclass(frozen=True, slots=True)
class Avoided:
    """The nodes on which the kube-scheduler found no place for a workload of this generation, the latest last."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lately:
    """The share that a tenant held on average (`value`) up to the moment `at`, from when on it held `share`."""

    value: float
    share: float
    at: float


@dataclass(frozen=True, slots=True)
class Provisioning:
    """How far a workload of this generation is with a node of its own.

    waiting: short of capacity since `since`, nothing is ordered yet. ordered: its order is open. provisioned: the
    autoscaler has room for it, booked by `booking`. failed: its order was given up at `since`.
    """

    generation: int
    state: Literal["waiting", "ordered", "provisioned", "failed"]
    since: float
    booking: Booking | None = None

    @property
    def open(self) -> bool:
        """Whether there is an order, which somebody carries out."""
        return self.state in ("ordered", "provisioned")


@dataclass(frozen=True, slots=True)
class Ledger:
    """The placement ledger's durable state, passed to every decision; all else is read from the cluster.

    in_flight: promises whose Job the planner's cache may not show yet, by workload UID.
    turns: the present or next turn of workloads that came back (0/0 for all others), until they are gone.
    held: workloads handed to their own workflow with a verdict and not back yet -> the turn it was about.
    accepted: workloads whose template the API server took in a dry run -> the generation it took.
    rejected: workloads whose template the API server refused in a dry run -> the generation it refused.
    made: the resourceVersion that an in-flight promise's Job was created with, once it is known to be: a cache that
    has seen that version and shows no such Job tells that the Job came and went, and the promise with it.
    avoided: workloads that were withdrawn since a pod of theirs was last bound -> where; other nodes go first.
    lately: what each tenant held on average, by the name of its GPUQuota.
    clearing: workloads for which others are being stopped -> their generation; they go first until they are placed.
    rooms: where room is being made for those, so that of several none takes another's; pods by node.
    provisioning: workloads for which a node is ordered, may be soon, or was in vain.
    spared: workloads whose Job could not be stopped when somebody was to get its place -> until when none tries again.
    reserved: the GPUs that are kept on each node for a GPUReservation, by its UID.
    """

    in_flight: dict[str, Assignment] = field(default_factory=dict)
    turns: dict[str, Turn] = field(default_factory=dict)
    held: dict[str, Turn] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    avoided: dict[str, Avoided] = field(default_factory=dict)
    lately: dict[str, Lately] = field(default_factory=dict)
    clearing: dict[str, int] = field(default_factory=dict)
    rooms: dict[str, Places] = field(default_factory=dict)
    provisioning: dict[str, Provisioning] = field(default_factory=dict)
    spared: dict[str, float] = field(default_factory=dict)
    reserved: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment, as the planner's cache shows it; the versions tell how new its view of a kind is."""

    now: float
    nodes: tuple[NodeView, ...]
    pods: tuple[PodView, ...]
    jobs: tuple[JobView, ...]
    workloads: tuple[WorkloadView, ...]
    defaults: Defaults
    jobs_version: int = 0
    workloads_version: int = 0
    quotas: tuple[QuotaView, ...] = ()
    profiles: tuple[Profile, ...] = ()
    reservations: tuple[ReservationView, ...] = ()
    warm: Warm = field(default_factory=dict)

    def by_uid(self) -> dict[tuple[str, str], WorkloadView]:
        """The workloads by namespace and UID: a label alone would let any namespace pose as another's."""
        return {(view.namespace, view.uid): view for view in self.workloads}


@dataclass(frozen=True, slots=True)
class Waiting:
    """A workload that stays in the queue (or outside it: not accepted, suspended); `reason` is CamelCase."""

    uid: str
    namespace: str
    name: str
    resource_version: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """This workload cannot go on by waiting: no node could hold it even empty, or the API server refused its Job."""

    uid: str
    namespace: str
    name: str
    turn: Turn
    reason: str
    message: str
    generation: int = 0  # of the workload it was about: an edited workload is looked at anew at once


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A Job to take back because its pod found no place in time; the workload is placed anew with `next_turn`.

    `generation`: of the workload. 0: decided by an older build, whose ledgers took the turn with the decision; they
    still do when their histories are replayed, so that the same commands follow.
    `avoid`: the Job's node, if the kube-scheduler tried its pod there; a pod that nobody tried says nothing of a node.
    `reason`: what the workload is told. `keep`: the Job stays as it is, suspended, and may go on in the next turn.
    """

    uid: str
    namespace: str
    name: str
    job_name: str
    job_uid: str
    next_turn: Turn
    message: str
    job_version: int = 0  # the Job's resourceVersion as it was decided upon
    generation: int = 0
    avoid: str = ""
    reason: str = "Withdrawn"
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running Job to suspend, because its place goes to another workload; once its pods are gone its turn is over."""

    uid: str
    namespace: str
    name: str
    job_name: str
    job_uid: str
    job_version: int
    next_turn: Turn
    message: str
    winner: str  # the UID of the workload that gets the place
    winner_generation: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A workload whose first Job completed: it ends with it, and nothing is left to decide."""

    uid: str
    namespace: str
    name: str
    job_name: str


@dataclass(frozen=True, slots=True)
class Expectation:
    """When a waiting workload is expected to start, and by when nine times in ten."""

    uid: str
    namespace: str
    name: str
    start: float
    latest: float


@dataclass(frozen=True, slots=True)
class Pin:
    """A gang all of whose pods are there, gated: each is told its node, and its gate is lifted."""

    uid: str
    namespace: str
    name: str
    job_name: str
    job_uid: str
    places: Places


@dataclass(frozen=True, slots=True)
class Order:
    """Have a node provisioned for this workload."""

    uid: str
    namespace: str
    name: str
    generation: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What one round decided. The ledger applies it as it stands; nothing of it is decided again."""

    assignments: list[Assignment] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)  # only those whose status must change
    examine: list[Waiting] = field(default_factory=list)  # templates to check by a dry-run Job, before they queue
    verdicts: list[Verdict] = field(default_factory=list)
    withdrawals: list[Withdrawal] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)  # UIDs whose promise is over: its Job is visible, or came and went
    forget: list[str] = field(default_factory=list)  # UIDs of the ledger that are gone or tombstones
    reconsidered: list[str] = field(default_factory=list)  # UIDs for which no node is avoided any more
    queued: int = 0  # workloads still waiting for a place after this round
    reasons: dict[str, int] = field(default_factory=dict)  # the same by why they wait
    more: bool = False  # the round was cut at its limit; decide again at once
    wake_after: float | None = None  # seconds until something is due (a bind deadline)
    preemptions: list[Preemption] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)  # UIDs for which nobody is being stopped any more
    lately: dict[str, Lately] = field(default_factory=dict)  # of all tenants, where it was reckoned anew
    completions: list[Completion] = field(default_factory=list)
    expected: list[Expectation] = field(default_factory=list)  # statuses to tell when their workload starts
    pins: list[Pin] = field(default_factory=list)
    rooms: dict[str, Places] = field(default_factory=dict)  # for whom room is made elsewhere than the ledger knows
    orders: list[Order] = field(default_factory=list)
    provisioning: dict[str, Provisioning] = field(default_factory=dict)  # what changed in the ledger's, by UID
    unprovisioned: list[str] = field(default_factory=list)  # UIDs of which the ledger need not remember that any more
    stoppable: list[str] = field(default_factory=list)  # UIDs that were spared long enough: they may be tried again
    reserved: dict[str, dict[str, int]] | None = None  # the ledger's from now on; None: as it was
