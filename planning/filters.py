"""Decides which nodes may hold a request, and explains to a person why none does: now, or ever.

For the placement round. What a node says for itself (ready, cordon, taints, labels) is separated from what is free on
it, because the first is the same for all requests of one shape and is looked at once a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from planning.accelerators import SEAT, seat_size
from planning.capacity import Room
from planning.model import NodeView, Resources, Taint

NO_SCHEDULE = ("NoSchedule", "NoExecute")
# taints that follow a node's condition: they come and go by themselves
_CONDITION_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")


@dataclass(frozen=True, slots=True)
class TolerationView:
    key: str
    operator: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Requirement:
    """One expression of a node affinity; `field` is True for matchFields."""

    key: str
    operator: str
    values: tuple[str, ...]
    field: bool = False


NodeTerm = tuple[Requirement, ...]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Which nodes a request allows, whatever is free on them. `gpu_memory`: what each GPU must have, in MiB."""

    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[TolerationView, ...] = ()
    affinity: tuple[NodeTerm, ...] | None = None
    gpu_resource: str = ""
    gpu_memory: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """All that placement needs to know of a request: two workloads of one shape fit the same nodes."""

    requests: Resources
    constraints: Constraints = Constraints()


def tolerates(tolerations: Iterable[TolerationView], taint: Taint) -> bool:
    """Whether one of the tolerations covers the taint (as k8s.io/api Toleration.ToleratesTaint)."""
    for toleration in tolerations:
        if toleration.effect and toleration.effect != taint.effect:
            continue
        if toleration.key and toleration.key != taint.key:
            continue
        if toleration.operator == "Exists" or (toleration.key and toleration.value == taint.value):
            return True
    return False


def matches(requirement: Requirement, node: NodeView) -> bool:
    """Whether the node satisfies one expression; an unknown operator or field is never satisfied."""
    if requirement.field:
        have = node.name if requirement.key == "metadata.name" else None
        if have is None or requirement.operator not in ("In", "NotIn"):
            return False
    else:
        have = node.labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return have is not None and have in requirement.values
        case "NotIn":
            return have is None or have not in requirement.values
        case "Exists":
            return have is not None
        case "DoesNotExist":
            return have is None
        case "Gt" | "Lt":
            bound, number = _integer(requirement.values[0] if len(requirement.values) == 1 else ""), _integer(have)
            if bound is None or number is None:
                return False
            return number > bound if requirement.operator == "Gt" else number < bound
    return False


def affine(constraints: Constraints, node: NodeView) -> str:
    """'' if labels and name of the node suit, else what does not: 'its nodeSelector zone=a' or 'its node affinity'."""
    labels = node.labels
    for key, value in constraints.selector:
        if labels.get(key) != value:
            return f"its nodeSelector {key}={value}"
    if constraints.affinity is not None and not any(
        term and all(matches(requirement, node) for requirement in term) for term in constraints.affinity
    ):
        return "its node affinity"
    return ""


def too_small(constraints: Constraints, node: NodeView, now: float = inf) -> str:
    """'' if each of the node's GPUs has the memory that is asked for, or it has none of them; else what they have.

    `now`: of a node that is new then it may be not told yet, which is nothing against it; without it, it is.
    """
    if not constraints.gpu_memory or not node.most(constraints.gpu_resource):
        return ""
    memory = node.memory_of(constraints.gpu_resource)
    if memory >= constraints.gpu_memory:
        return ""
    if memory:
        return f"with GPUs of {show_mib(memory)}"
    return "" if node.is_new(now) else "whose labels do not tell their GPUs' memory"


def repelling_taint(constraints: Constraints, node: NodeView, *, lasting: bool = False) -> Taint | None:
    """The first taint that keeps the request off the node; `lasting` leaves out those of a passing condition."""
    for taint in node.taints:
        if taint.effect not in NO_SCHEDULE or (lasting and taint.key.startswith(_CONDITION_TAINTS)):
            continue
        if not tolerates(constraints.tolerations, taint):
            return taint
    return None


def refusal(constraints: Constraints, node: NodeView) -> str:
    """'' if the node takes such requests now, else why not; the first reason a person would give."""
    wrong = affine(constraints, node)
    if wrong:
        return f"not matched by {wrong}"
    small = too_small(constraints, node)
    if small:
        return f"{small} (it needs {show_mib(constraints.gpu_memory)})"
    if node.out_of_service:
        return "out of service"
    if not node.ready:
        return "not ready"
    if node.unschedulable and not tolerates(
        constraints.tolerations, Taint("node.kubernetes.io/unschedulable", "", "NoSchedule")
    ):
        return "cordoned"
    taint = repelling_taint(constraints, node)
    return f"tainted {show_taint(taint)}" if taint else ""


def show_taint(taint: Taint) -> str:
    """A taint as kubectl writes it."""
    return f"{taint.key}={taint.value}:{taint.effect}" if taint.value else f"{taint.key}:{taint.effect}"


def lacking(need: Resources, free: Resources | Room) -> str:
    """'' if `need` fits into `free`, else the first thing missing: GPUs, CPU, memory or pods."""
    there = free.gpus if need.gpu_resource == free.gpu_resource else free.of(need.gpu_resource)
    if need.gpus > there:
        return "GPUs"
    if need.cpu_milli > free.cpu_milli:
        return "CPU"
    if need.memory > free.memory:
        return "memory"
    if need.pods > free.pods:
        return "pods"
    return ""


def shortage(need: Resources, node: NodeView, left: Room) -> str:
    """What the node lacks now, of which `left` is free: '' if nothing."""
    offered = node.allocatable.of(need.gpu_resource)
    if offered < need.gpus:
        gap = node.gap(need.gpu_resource)
        if gap is not None and gap.expected >= need.gpus:
            return gap.why
        what = need.gpu_resource or "GPUs"
        return f"too few {what}" if offered else f"no {what}"
    short = lacking(need, left)
    return f"short of free {short}" if short else ""


def able_when_empty(shape: Shape, node: NodeView, now: float = inf) -> bool:
    """Whether the node could hold the request if nothing else ran there.

    A cordoned or unready node counts, and so does one whose GPUs are expected back: they may come back by themselves.
    `now` as in `too_small`.
    """
    asked = shape.constraints
    if affine(asked, node) or too_small(asked, node, now) or repelling_taint(asked, node, lasting=True):
        return False
    need, whole = shape.requests, node.allocatable
    if need.gpus > node.most(need.gpu_resource):
        return False
    if not node.ready and whole.cpu_milli == 0 and whole.memory == 0:
        return True  # a node that never reported: nothing is known against it
    return need.cpu_milli <= whole.cpu_milli and need.memory <= whole.memory and need.pods <= whole.pods


def slots(need: Resources, free: Resources | Room) -> int:
    """How many such requests fit into `free`."""
    asked = (need.gpus, need.cpu_milli, need.memory, need.pods)
    there = (free.of(need.gpu_resource), free.cpu_milli, free.memory, free.pods)
    return max(0, min(whole // each for each, whole in zip(asked, there, strict=True) if each))


def slots_when_empty(shape: Shape, node: NodeView, now: float = inf) -> int:
    """How many such requests the node could hold if nothing else ran there; see `able_when_empty`."""
    if not able_when_empty(shape, node, now):
        return 0
    need, offered, kind = shape.requests, node.allocatable, shape.requests.gpu_resource
    gpus = node.most(kind)
    if not node.ready and offered.cpu_milli == 0 and offered.memory == 0:
        return slots(Resources(need.gpus), Resources(gpus))
    return slots(need, Resources(gpus, offered.cpu_milli, offered.memory, offered.pods, gpu_resource=kind))


def within(constraints: Constraints, label: str, value: str) -> Constraints:
    """The same among the nodes that have this value of the label; '' stands also for those that lack the label."""
    if value:
        return replace(constraints, selector=(*constraints.selector, (label, value)))
    terms = constraints.affinity if constraints.affinity is not None else ((),)
    # An empty term of the request's own matches nothing, and stays so.
    mine = [term for term in terms if term or constraints.affinity is None]
    without = Requirement(label, "DoesNotExist", ()), Requirement(label, "In", ("",))
    return replace(constraints, affinity=tuple((*term, each) for term in mine for each in without))


def explain_never(shape: Shape, nodes: Sequence[NodeView]) -> str:
    """Why no node could hold the request even empty, for a person."""
    need, kind = shape.requests, shape.requests.gpu_resource
    if not nodes:
        return f"there is no node in the cluster; it needs {_asked(need)}"
    if kind and not any(node.most(kind) for node in nodes):
        return _nobody_offers(kind)
    matched = [node for node in nodes if not affine(shape.constraints, node)]
    if not matched:
        causes = Counter(affine(shape.constraints, node) for node in nodes)
        return f"none of {_nodes(len(nodes))} is matched by {causes.most_common(1)[0][0]}"
    suited = [node for node in matched if not too_small(shape.constraints, node)]
    if len(suited) < len(matched) and not any(node.most(kind) for node in suited):
        sizes = Counter(small for node in matched if (small := too_small(shape.constraints, node)))
        least = show_mib(shape.constraints.gpu_memory)
        return f"it needs GPUs of {least} or more, but none of {_nodes(len(matched))} has such: {_top(sizes)}"
    open_to = [node for node in suited if repelling_taint(shape.constraints, node, lasting=True) is None]
    if not open_to:
        taints = Counter(_taint_of(shape.constraints, node) for node in suited)
        return f"all {_nodes(len(suited))} that could be meant carry a taint it does not tolerate: {_top(taints)}"
    left_out = _left_out(len(nodes), len(matched), len(suited), len(open_to))
    largest = max(node.most(kind) for node in open_to)
    if largest < need.gpus:
        gaps = Counter(gap.why for node in open_to if (gap := node.gap(kind)))
        text = f"no node has {_asked(need)}; the largest{left_out} has {largest}"
        return text + (f" ({_top(gaps)})" if gaps else "")
    enough = [node for node in open_to if node.most(kind) >= need.gpus]
    causes = Counter(lacking(_without_gpus(need), node.allocatable) for node in enough)
    most = causes.most_common(1)[0][0]
    return (
        f"{len(enough)} of {_nodes(len(nodes))} have {_asked(need)}, but none has enough {most} even when empty"
        f": it needs {show_amount(most, need)}, the largest{left_out} has {show_amount(most, _largest(enough, most))}"
    )


def explain_now(shape: Shape, nodes: Sequence[NodeView], left: Mapping[str, Room], refusals: Sequence[str]) -> str:
    """Why no node holds the request now although one could, for a person.

    `left` is what is left by node name; `refusals` are the nodes' in their order.
    """
    need = shape.requests
    large = 0
    causes: Counter[str] = Counter()
    for node, why in zip(nodes, refusals, strict=True):
        if node.most(need.gpu_resource) < need.gpus:
            continue
        large += 1
        causes[why or shortage(need, node, left[node.name])] += 1
    short = causes["short of free GPUs"]
    text = f"needs {_asked(need)} on one node; {large} of {_nodes(len(nodes))} {_have(large)} {need.gpus}"
    if short == large:
        return f"{text}, none has {need.gpus} free now"
    return f"{text}, none can take it now: {_top(causes)}"


def _taint_of(constraints: Constraints, node: NodeView) -> str:
    taint = repelling_taint(constraints, node, lasting=True)
    return show_taint(taint) if taint else ""


def _nobody_offers(kind: str) -> str:
    """What is said where no node has such GPUs; of a seat, what it is for."""
    if not seat_size(kind):
        return f"no node offers {kind}"
    if kind != SEAT:
        return f"no node offers seats of that size ({kind})"
    return (
        f"no node offers seats on single GPUs ({kind}), and berth gives parts of GPUs only as seats: install seats, or "
        "ask for a whole GPU, without gpuFraction"
    )


def _left_out(total: int, matched: int, suited: int, open_to: int) -> str:
    if open_to == total:
        return ""
    parts = []
    if matched < total:
        parts.append(f"{total - matched} not selected")
    if suited < matched:
        parts.append(f"{matched - suited} with too little GPU memory")
    if open_to < suited:
        parts.append(f"{suited - open_to} tainted")
    return f" of the {_nodes(open_to)} it may use ({', '.join(parts)})"


def _top(causes: Counter[str]) -> str:
    """`12 cordoned, 3 not ready`: the most frequent causes first, at most four."""
    ranked = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{count} {cause}" for cause, count in ranked[:4])
    return shown + (f", {sum(count for _, count in ranked[4:])} otherwise" if len(ranked) > 4 else "")


def _without_gpus(need: Resources) -> Resources:
    return Resources(0, need.cpu_milli, need.memory, need.pods)


def _largest(nodes: Iterable[NodeView], what: str) -> Resources:
    key = {"CPU": "cpu_milli", "memory": "memory"}.get(what, "pods")
    return max((node.allocatable for node in nodes), key=lambda whole: int(getattr(whole, key)))


def show_amount(what: str, resources: Resources) -> str:
    """How much of 'CPU', 'memory' or 'pods' that is, with its unit."""
    if what == "CPU":
        return f"{resources.cpu_milli / 1000:g} CPU"
    if what == "memory":
        return f"{resources.memory / 2**30:.1f}".removesuffix(".0") + " GiB"
    return f"{resources.pods} pod(s)"


def show_mib(amount: int) -> str:
    """Memory of a GPU."""
    return f"{amount / 1024:.1f}".removesuffix(".0") + " GiB"


def show_gpus(count: int, resource: str = "") -> str:
    """`4 GPUs`, or `4 amd.com/gpu` where it is not the installation's resource."""
    if resource:
        return f"{count} {resource}"
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _asked(need: Resources) -> str:
    return show_gpus(need.gpus, need.gpu_resource)


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _integer(text: str | None) -> int | None:
    try:
        return int(text) if text is not None and len(text) <= 20 else None
    except ValueError:
        return None
