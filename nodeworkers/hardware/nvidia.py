"""NVIDIA's GPUs of a node, by NVML: which there are, how they are connected, and how well they are. The source of the
watcher of NVIDIA's GPUs.

One NVML session lasts from look to look, since errors (XIDs) are told only to who listens. It begins anew when GPUs
come or go, and where there is no driver each look tries again. A GPU that fails costs itself and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodeworkers.hardware.nvidia_cards import (
    Asker,
    Condition,
    Instance,
    describe,
    examine,
    identity,
    instances,
    measure,
)
from nodeworkers.hardware.nvidia_faults import APPLICATION_XIDS, DOUBLE_BIT_ECC, RESET, Faults, affects_all
from nodeworkers.hardware.nvidia_links import Wiring, wiring
from nodeworkers.hardware.provider import UNKNOWN, HardwareError, said
from planning.devices.cards import Card, Reading, Sight, Trouble, Vendor

FABRIC_UNREADY = ("not started", "in progress", "failed")
MOST_EVENTS = 256  # taken in one go; what is left waits for the next


@dataclass(slots=True)
class _Gpu:
    """One GPU in one look. `handle`: None if it does not say who it is; it is then as it was before."""

    card: Card
    handle: Any
    asker: Asker
    instances: tuple[Instance, ...] = ()
    reading: Reading | None = None
    condition: Condition | None = None
    unheard: str = ""  # why its errors are not reported, a sentence

    @property
    def ids(self) -> list[str]:
        return [self.card.id, *(each.card.id for each in self.instances)]


@dataclass(slots=True)
class _Session:
    """An open NVML. `bound`: the PCI devices that the driver had when it began. `known`: what the GPU of each number
    was when it last told, for NVML gives a lost one no name. `events`: an event set, None where there is none.
    """

    bound: frozenset[str]
    events: Any = None
    listening: set[str] = field(default_factory=set)
    known: dict[int, _Gpu] = field(default_factory=dict)


class Nvidia:
    """A source. `library`: what serves as the module pynvml; None imports that one. `clock`: seconds, monotonic."""

    def __init__(
        self,
        library: Any = None,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = library
        self._sys, self._dev, self._proc = sys, dev, proc
        self._faults = Faults(clock)
        self._session: _Session | None = None
        self._deaf = ""  # why no errors are heard, a sentence
        self._stranger = ""  # the last error of a GPU that nobody knows, a sentence
        self._wired: tuple[dict[str, str], Wiring] | None = None

    @property
    def vendor(self) -> Vendor:
        return "nvidia"

    def look(self) -> Sight:
        """Every GPU and MIG instance; none where there is no driver. A GPU in MIG mode is there with the resource '',
        for only its instances can be had. Blocks for as long as the driver does. Raises HardwareError.
        """
        nvml = self._nvml()
        simulated = bool(getattr(nvml, "simulated", False))
        session = self._open(nvml)
        if session is None:
            return Sight("nvidia", simulated=simulated)
        try:
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self._end(nvml)
            raise HardwareError(f"NVIDIA's driver lists no GPUs: {_advised(nvml, error)}") from error
        node = Asker(nvml)
        driver = said(node.ask(nvml.nvmlSystemGetDriverVersion)) or UNKNOWN
        gpus, problems = self._gpus(nvml, session, count, driver)
        self._listen(nvml, session, gpus)
        wired = self._wiring(nvml, gpus)
        self._faults.listed({name for gpu in gpus for name in gpu.ids})
        for gpu in gpus:
            self._learn(gpu)
        troubles: dict[str, Trouble] = {}
        host = {"driver": driver, **_cuda(node), **_persistence(gpus), **_fabric(gpus)}
        if self._stranger:
            host["attention"] = self._stranger
        for gpu in gpus:
            switched = bool(wired.switched.get(gpu.card.id))
            for name in gpu.ids:
                if trouble := self._trouble(gpu, name, switched):
                    troubles[name] = trouble
                if told := self._told(gpu, name):
                    host[f"attention/{name}"] = told
        return Sight(
            vendor="nvidia",
            cards=tuple(card for gpu in gpus for card in (gpu.card, *(each.card for each in gpu.instances))),
            troubles=troubles,
            readings={name: reading for gpu in gpus for name, reading in _readings(gpu).items()},
            links=wired.links,
            problem=" ".join([*problems, self._deaf]).strip(),
            host=host,
            simulated=simulated,
        )

    def wait(self, seconds: float) -> None:
        """Until the driver reports an error, or for so many seconds where it reports none or cannot be listened to."""
        nvml, session = self._nvml(), self._session
        if session is None or session.events is None or not session.listening:
            time.sleep(seconds)
            return
        timeout = max(1, int(seconds * 1000))
        try:
            for _ in range(MOST_EVENTS):
                self._heard(nvml, session, nvml.nvmlEventSetWait(session.events, timeout))
                self._deaf, timeout = "", 0  # and the rest of those that came together
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                self._deaf = ""
                return
            # Above all when a GPU is lost. The next look finds out which, and listens to the others.
            self._deaf = f"NVIDIA's driver reports no errors of its GPUs: {_advised(nvml, error)}"
            self._stop_listening(nvml, session)
            time.sleep(seconds)

    def close(self) -> None:
        """Ends the session."""
        self._end(self._nvml())

    def _nvml(self) -> Any:
        return self._given or importlib.import_module("pynvml")

    def _open(self, nvml: Any) -> _Session | None:
        """The session, None where there is no driver; a new one where the driver has other GPUs than it had."""
        bound = self._bound()
        if self._session is not None and self._session.bound != bound:
            self._end(nvml)
        if self._session is None:
            try:
                nvml.nvmlInit()
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
                    self._faults.listed(())  # when it is loaded again, its GPUs are as after a reset
                    return None
                if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                    return None
                raise HardwareError(f"NVIDIA's driver does not start: {_advised(nvml, error)}") from error
            self._session = _Session(bound)
        return self._session

    def _bound(self) -> frozenset[str]:
        """The PCI devices of the driver, none where /sys does not tell: NVML itself never lists one that came later."""
        try:
            return frozenset(each.name for each in (self._sys / "bus/pci/drivers/nvidia").iterdir() if ":" in each.name)
        except OSError:
            return frozenset()

    def _end(self, nvml: Any) -> None:
        if self._session is not None:
            self._stop_listening(nvml, self._session)
            self._session, self._deaf = None, ""
            # Whoever ends it begins anew or goes away; what it says to that changes nothing.
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _gpus(self, nvml: Any, session: _Session, count: int, driver: str) -> tuple[list[_Gpu], list[str]]:
        gpus: dict[str, _Gpu] = {}
        problems: list[str] = []
        for number in range(count):
            asker = Asker(nvml)
            gpu = self._gpu(session, asker, number, driver)
            if gpu is None:
                problems.append(f"NVIDIA GPU {number} of {count} does not answer: {_why(asker)}")
            elif gpu.card.id in gpus:
                problems.append(
                    f"NVIDIA GPU {number} of {count} has the UUID of another, {gpu.card.id}: it is left out."
                )
            else:
                gpus[gpu.card.id] = gpu
        return list(gpus.values()), problems

    def _gpu(self, session: _Session, asker: Asker, number: int, driver: str) -> _Gpu | None:
        """The `number`th GPU of the driver as it is now, or as it was; None if it was never known."""
        before = session.known.get(number)
        handle = asker.ask(asker.nvml.nvmlDeviceGetHandleByIndex, number)
        card = None if handle is None else describe(asker, handle, number, driver, self._sys, self._dev)
        if card is None:
            return before and _Gpu(before.card, None, asker, before.instances)
        if before is not None and before.card.id != card.id:
            before = None
        if before is not None and asker.failed is not None:
            card = before.card  # half an answer is no new description
        gpu = _Gpu(card, handle, asker)
        if not card.resource:
            gpu.instances = tuple(instances(asker, handle, card, self._proc, self._dev))
            if before is not None and asker.failed is not None:
                gpu.instances = before.instances
        gpu.reading = measure(asker, handle)
        gpu.condition = examine(asker, handle, gpu.reading.temperature)
        session.known[number] = gpu
        return gpu

    def _learn(self, gpu: _Gpu) -> None:
        if gpu.asker.lost:
            self._faults.lost(gpu.card.id)
        elif gpu.asker.failed is None and gpu.condition is not None:
            for name in gpu.ids:
                whole = name == gpu.card.id
                self._faults.answered(name, gpu.condition.action, gpu.condition.uncorrected if whole else None)

    def _trouble(self, gpu: _Gpu, name: str, switched: bool) -> Trouble | None:
        """What speaks most against a GPU, or an instance `name` of it; whatever the GPU has, its instances have."""
        asker, condition = gpu.asker, gpu.condition
        found: list[Trouble | None] = []
        if asker.lost:
            found.append(Trouble("GpuLost", _why(asker), sure=True))
        elif asker.needs_reset:
            found.append(Trouble("ResetRequired", _why(asker), sure=True))
        found += [self._faults.trouble(gpu.card.id), self._faults.trouble(name)]
        if condition is not None:
            found += condition.troubles
            if switched and condition.fabric in FABRIC_UNREADY:
                found.append(Trouble("FabricNotReady", f"The NVSwitch fabric has not taken it in: {_FABRIC_ADVICE}"))
        if gpu.handle is None or asker.failed is not None:
            found.append(Trouble("NotAnswering", f"The driver does not answer for it: {_why(asker)}"))
        known = [each for each in found if each is not None]
        return next((each for each in known if each.sure), known[0] if known else None)

    def _told(self, gpu: _Gpu, name: str) -> str:
        sentences = [self._faults.told(gpu.card.id)]
        if name != gpu.card.id:
            sentences.append(self._faults.told(name))
        if gpu.condition is not None:
            sentences += gpu.condition.told
        return " ".join(each for each in [*sentences, gpu.unheard] if each)

    def _listen(self, nvml: Any, session: _Session, gpus: Sequence[_Gpu]) -> None:
        """Hears of the errors of each GPU that can tell them, and has no trouble to answer: a lost one makes NVML deaf
        for all.
        """
        if session.events is None:
            try:
                session.events = nvml.nvmlEventSetCreate()
            except nvml.NVMLError as error:
                self._deaf = f"NVIDIA's driver reports no errors of its GPUs: {_advised(nvml, error)}"
                return
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        for gpu in gpus:
            if gpu.card.id in session.listening or gpu.handle is None or gpu.asker.failed is not None:
                continue
            asker = Asker(nvml)
            kinds = (asker.ask(nvml.nvmlDeviceGetSupportedEventTypes, gpu.handle) or 0) & wanted
            try:
                if kinds:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, kinds, session.events)
                    session.listening.add(gpu.card.id)
                    continue
            except nvml.NVMLError as error:
                asker.failed = error
            why = _why(asker) if asker.failed else "its driver does not support it."
            gpu.unheard = f"Its errors are not reported, and it is judged by its answers alone: {why}"

    def _stop_listening(self, nvml: Any, session: _Session) -> None:
        if session.events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(session.events)
            session.events = None
            session.listening.clear()

    def _heard(self, nvml: Any, session: _Session, event: Any) -> None:
        """An error is held against the GPU that had it, or the MIG instance where no more than that is affected."""
        if event.eventType == nvml.nvmlEventTypeXidCriticalError:
            xid = int(event.eventData)
        elif event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
            xid = DOUBLE_BIT_ECC
        else:
            return
        asker = Asker(nvml)
        name = identity(asker.ask(nvml.nvmlDeviceGetUUID, event.device))
        gpu = next((each for each in session.known.values() if each.card.id == name), None)
        if gpu is not None:
            mine = [each for each in gpu.instances if each.holds(event.gpuInstanceId, event.computeInstanceId)]
            hit = [name] if affects_all(xid) or not mine else [each.card.id for each in mine]
            for each in hit:
                self._faults.reported(each, xid)
        elif not asker.lost and xid not in APPLICATION_XIDS:  # a lost one is found by the next look
            what = f"XID {xid}" if xid else "an ECC error"
            self._stranger = (
                f"NVIDIA's driver reported {what} of a GPU that it does not list ({name or 'without a UUID'}). It is "
                "held against none; look for NVRM in the node's kernel log."
            )

    def _wiring(self, nvml: Any, gpus: Sequence[_Gpu]) -> Wiring:
        """Read once for each set of GPUs: it takes hundreds of calls."""
        answering = {gpu.card.id: (gpu.card.address, gpu.handle) for gpu in gpus if gpu.handle and not gpu.asker.lost}
        key = {name: address for name, (address, _) in answering.items()}
        if self._wired is None or self._wired[0] != key or not self._wired[1].complete:
            self._wired = (key, wiring(nvml, answering))
        return self._wired[1]


_FABRIC_ADVICE = "programs on it do not start. Look at nvidia-fabricmanager, and at its log, on the node."


def _readings(gpu: _Gpu) -> dict[str, Reading]:
    readings = {each.card.id: measure(Asker(gpu.asker.nvml), each.handle) for each in gpu.instances if gpu.handle}
    return readings if gpu.reading is None else {gpu.card.id: gpu.reading, **readings}


def _cuda(node: Asker) -> dict[str, str]:
    """`cuda`: the newest CUDA that the driver supports, like 13.0."""
    version = node.ask(node.nvml.nvmlSystemGetCudaDriverVersion_v2)
    return {"cuda": f"{version // 1000}.{version % 1000 // 10}"} if version else {}


def _persistence(gpus: Sequence[_Gpu]) -> dict[str, str]:
    modes = {gpu.condition.persistence for gpu in gpus if gpu.condition is not None} - {None}
    return {"persistence": "mixed" if len(modes) > 1 else "on" if True in modes else "off"} if modes else {}


def _fabric(gpus: Sequence[_Gpu]) -> dict[str, str]:
    """`clique`: `<cluster>.<number>` of the NVLink domain that all are in; `fabric/<card>` where it is not ready."""
    conditions = {gpu.card.id: gpu.condition for gpu in gpus if gpu.condition is not None}
    facts = {f"fabric/{name}": each.fabric for name, each in conditions.items() if each.fabric in FABRIC_UNREADY}
    cliques = {each.clique for each in conditions.values()}
    if len(cliques) == 1 and "" not in cliques:
        facts["clique"] = cliques.pop()
    return facts


def _why(asker: Asker) -> str:
    if asker.failed is None:
        return "It does not say who it is. Run nvidia-smi on the node and look for NVRM in its kernel log."
    return _advised(asker.nvml, asker.failed)


def _advised(nvml: Any, error: Any) -> str:
    """NVML's own words, and what to do."""
    advice = {
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "the driver was replaced while the old one runs; drain the node and restart it."
        ),
        nvml.NVML_ERROR_NO_PERMISSION: "let berth's node process open /dev/nvidiactl and /dev/nvidia*.",
        nvml.NVML_ERROR_GPU_IS_LOST: "it fell off the bus; drain the node and restart it.",
        nvml.NVML_ERROR_RESET_REQUIRED: RESET,
    }.get(error.value, "run nvidia-smi on the node and look for NVRM in its kernel log.")
    return f"{str(error).rstrip('.')}; {advice[0].lower()}{advice[1:]}"
