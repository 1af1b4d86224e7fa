"""A conformance set for device plugins: what a kubelet's life holds for them, one scenario after another.

For `python -m tests.fake_kubelet`, and for tests that judge a plugin of their own. A scenario passes, fails with the
reason, or is skipped where it does not apply; what the plugin breaks besides stands in the kubelet's violations.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from tests.fake_kubelet.kubelet import FakeKubelet
from tests.fake_kubelet.pods import Pod
from tests.fake_kubelet.transcript import Violation

QUIET_SECONDS = 12.0
"""Two rounds of the plugins that send their list every five seconds."""
_RUNTIME_SECONDS = 1.1


class Failed(Exception):
    """The plugin does not do what a kubelet needs."""


class Skipped(Exception):
    """The scenario says nothing about this plugin."""


@dataclass(frozen=True)
class Outcome:
    """How one scenario went; `outcome` is pass, fail or skip."""

    scenario: str
    outcome: str
    seconds: float
    text: str
    violations: tuple[Violation, ...]


class Process:
    """The plugin's process, when the conformance set is to start and end it."""

    def __init__(self, command: Sequence[str], output: IO[Any] | None = None) -> None:
        """`output` takes what it writes; None: it is thrown away."""
        self.command, self._output = command, output
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> asyncio.subprocess.Process:
        """One more; a second after another at the earliest, as no runtime is faster. Raises OSError."""
        if self._processes:
            await asyncio.sleep(_RUNTIME_SECONDS)
        output = asyncio.subprocess.DEVNULL if self._output is None else self._output
        process = await asyncio.create_subprocess_exec(
            *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        self._processes.append(process)
        return process

    @property
    def newest(self) -> asyncio.subprocess.Process:
        """The one started last of those that run, or were not seen to end."""
        return next((each for each in reversed(self._processes) if each.returncode is None), self._processes[-1])

    async def end(self, process: asyncio.subprocess.Process, how: signal.Signals, seconds: float = 10.0) -> None:
        """With the group that it leads; by SIGKILL if it does not go."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def end_all(self) -> None:
        """Those that still run."""
        for process in self._processes:
            if process.returncode is None:
                await self.end(process, signal.SIGTERM)


@dataclass
class Trial:
    """One run against one kubelet. `patience`: seconds for the plugin to come back; `process`: None if it runs by
    itself. `plenty`: the resources that had devices when the plugin was well, with how many.
    """

    kubelet: FakeKubelet
    patience: float = 30.0
    process: Process | None = None
    quiet: float = QUIET_SECONDS

    def __post_init__(self) -> None:
        self.plenty: dict[str, int] = {}
        self._pods = 0

    async def well(self) -> float:
        """Waits until everything that there was is allocatable again; after how many seconds. Raises Failed."""
        began = time.monotonic()
        try:
            await self.kubelet.until(self._is_well, self.patience, f"{self.plenty} allocatable")
        except TimeoutError as error:
            raise Failed(str(error)) from error
        return time.monotonic() - began

    async def appear(self) -> None:
        """Waits for the plugin's first devices, and notes how many it has. Raises Failed."""
        kubelet = self.kubelet
        try:
            await kubelet.until(lambda: any(kubelet.allocatable.values()), self.patience, "a plugin with devices")
        except TimeoutError as error:
            raise Failed(str(error)) from error
        await asyncio.sleep(1)  # a plugin may have more than one resource: no event says that it has no other
        self.plenty = {name: count for name, count in kubelet.allocatable.items() if count}

    async def pod(self, wants: dict[str, int], init: dict[str, int] | None = None) -> Pod:
        """A pod that runs. Raises Failed."""
        self._pods += 1
        pod: Pod = await self._within(self.kubelet.admit(f"trial-{self._pods}", [wants], [init] if init else []))
        if pod.phase != "Running":
            errors = [each.error for each in pod.containers if each.error]
            raise Failed(f"A pod that wants {wants} does not run: {pod.message or errors}")
        return pod

    async def again(self, pod: Pod) -> None:
        """Its container starts anew. Raises Failed."""
        await self._within(self.kubelet.restart_container(pod, "c0"))
        if pod.container("c0").error:
            raise Failed(f"The container does not start again: {pod.container('c0').error}")

    async def _within(self, doing: Awaitable[Any]) -> Any:
        try:
            return await asyncio.wait_for(doing, self.patience)
        except TimeoutError:
            raise Failed(f"The plugin has not answered for {self.patience:g} s; every other pod waits.") from None

    def _is_well(self) -> bool:
        return all(self.kubelet.allocatable.get(name) == count for name, count in self.plenty.items())

    def clear(self) -> None:
        """Deletes all pods."""
        for pod in self.kubelet.pods:
            if pod.active:
                self.kubelet.delete(pod)


async def register(trial: Trial) -> str:
    """It registers, and lists devices."""
    text = ", ".join(f"{count} {name}" for name, count in sorted(trial.plenty.items()))
    absent = sorted(set(trial.kubelet.allocatable) - set(trial.plenty))
    return text + (f"; without devices: {', '.join(absent)}" if absent else "")


async def allocate(trial: Trial) -> str:
    """One device, and all of them, are given to a container with something that makes it see them."""
    for resource, count in trial.plenty.items():
        for wanted in sorted({1, count}):
            pod = await trial.pod({resource: wanted})
            given = pod.containers[0].given
            if not (given.env or given.mounts or given.nodes or given.cdi or given.annotations):
                raise Failed(f"A container with {wanted} {resource} was given nothing.")
            trial.kubelet.delete(pod)
    return "one device and all devices of each resource"


async def prefer(trial: Trial) -> str:
    """Every size can be preferred, with random devices taken."""
    flagged = []
    for resource, count in trial.plenty.items():
        options = trial.kubelet.options(resource)
        if options is None or not options.get_preferred_allocation_available:
            continue
        flagged.append(resource)
        for size in range(1, min(count, 8) + 1):
            pods = [await trial.pod({resource: 1}) for _ in range((count - size) // 2)]
            await trial.pod({resource: size})
            for pod in pods:
                trial.kubelet.delete(pod)
            trial.clear()
    if not flagged:
        raise Skipped("no resource offers GetPreferredAllocation")
    return f"all sizes up to 8 of {', '.join(flagged)}"


async def init_container(trial: Trial) -> str:
    """The device of an init container is asked for again at once by the pod's own container."""
    for resource in trial.plenty:
        pod = await trial.pod({resource: 1}, init={resource: 1})
        trial.kubelet.delete(pod)
    return "the same device twice in a row"


async def container_restart(trial: Trial) -> str:
    """A container starts again from what the kubelet remembers, without an Allocate."""
    for resource in trial.plenty:
        pod = await trial.pod({resource: 1})
        asked = len(trial.kubelet.transcript.of("PreStartContainer", resource))
        await trial.again(pod)
        options = trial.kubelet.options(resource)
        expected = bool(options is not None and options.pre_start_required)
        if (len(trial.kubelet.transcript.of("PreStartContainer", resource)) > asked) is not expected:
            raise Failed(f"PreStartContainer of {resource} is {'' if expected else 'not '}wanted.")
    return "from the kubelet's memory"


async def quiet(trial: Trial) -> str:
    """Nothing is sent while nothing changes."""
    before = len(trial.kubelet.transcript.of("list"))
    await asyncio.sleep(trial.quiet)  # what is proved is that nothing comes
    if sent := len(trial.kubelet.transcript.of("list")) - before:
        raise Failed(f"{sent} lists came in {trial.quiet:g} s in which nothing changed.")
    return f"no list in {trial.quiet:g} s"


async def restart(trial: Trial) -> str:
    """The kubelet is restarted while a pod runs: the same devices come back, and the pod's are still its own."""
    return await _over(trial, trial.kubelet.restart)


async def kill(trial: Trial) -> str:
    """The kubelet is killed, and away for two seconds in which its socket is there and nobody answers."""

    async def kill_and_start() -> None:
        await trial.kubelet.kill()
        await asyncio.sleep(2)  # the time it is away
        await trial.kubelet.start()

    return await _over(trial, kill_and_start)


async def restarts(trial: Trial) -> str:
    """Five restarts of the kubelet, so soon that the plugin may be amidst registering."""

    async def five() -> None:
        for _ in range(5):
            await trial.kubelet.restart()
            await asyncio.sleep(0.3)  # the time it lives

    return await _over(trial, five)


async def cut(trial: Trial) -> str:
    """The kubelet disconnects: its socket is the same, so is the plugin's; only the stream has ended."""
    took = []
    for resource in trial.plenty:
        await trial.kubelet.cut(resource)
        took.append(await trial.well())
    return f"back after {max(took):.2f} s"


async def plugin_killed(trial: Trial) -> str:
    """The plugin's process is killed and started again."""
    process = _process(trial)
    await process.end(process.newest, signal.SIGKILL)
    for resource, count in trial.plenty.items():
        try:
            await trial.kubelet.until_allocatable(resource, 0, trial.patience)
        except TimeoutError as error:
            raise Failed(f"The plugin was killed, and its devices are allocatable: {error}") from error
        if trial.kubelet.capacity.get(resource) != count:
            raise Failed(f"The capacity of {resource} did not stay while the plugin was away.")
    await process.start()
    return f"back after {await trial.well():.2f} s"


async def race(trial: Trial) -> str:
    """A second process registers while the first still serves; then the first ends, and its end must not be the end
    of the second one's devices.
    """
    process = _process(trial)
    old = process.newest
    registered = {name: len(trial.kubelet.transcript.of("registered", name)) for name in trial.plenty}
    second = await process.start()
    try:
        await trial.kubelet.until(
            lambda: all(len(trial.kubelet.transcript.of("registered", name)) > registered[name] for name in registered),
            trial.patience,
            "the second process has registered",
        )
    except TimeoutError:
        await process.end(second, signal.SIGTERM)
        raise Skipped("a second process does not register while the first serves") from None
    await process.end(old, signal.SIGTERM)
    await asyncio.sleep(1)  # the old streams' ends come through
    return f"back after {await trial.well():.2f} s"


async def churn(trial: Trial) -> str:
    """A hundred pods come and go."""
    resources = sorted(trial.plenty)
    for at in range(100):
        resource = resources[at % len(resources)]
        running = [pod for pod in trial.kubelet.pods if pod.active and pod.devices(resource)]
        if sum(len(pod.devices(resource)) for pod in running) == trial.plenty[resource]:
            trial.kubelet.delete(running[at % len(running)])
        else:
            await trial.pod({resource: 1})
    return "100 steps"


SCENARIOS: dict[str, Callable[[Trial], Awaitable[str]]] = {
    "register": register,
    "allocate": allocate,
    "prefer": prefer,
    "init-container": init_container,
    "container-restart": container_restart,
    "churn": churn,
    "quiet": quiet,
    "restart": restart,
    "kill": kill,
    "restarts": restarts,
    "cut": cut,
    "plugin-killed": plugin_killed,
    "race": race,
}
"""In the order of `all`."""
_PROVOKED = {"race": "registered-over-open-stream"}
"""What a scenario itself makes the plugin do."""


async def run(trial: Trial, names: Sequence[str]) -> list[Outcome]:
    """The scenarios, one after another. The plugin's process is started first, and its first devices are waited for;
    what has not come back after one scenario is waited for before the next.
    """
    outcomes: list[Outcome] = []
    if trial.process is not None:
        await trial.process.start()
    for name in names:
        began, known = time.monotonic(), len(trial.kubelet.violations)
        try:
            if trial.plenty:
                await trial.well()
            else:
                await trial.appear()
            outcome, text = "pass", await SCENARIOS[name](trial)
        except Skipped as skipped:
            outcome, text = "skip", str(skipped)
        except Failed as failed:
            outcome, text = "fail", str(failed)
        trial.clear()
        broken = tuple(each for each in trial.kubelet.violations[known:] if each.rule != _PROVOKED.get(name))
        outcomes.append(Outcome(name, outcome, time.monotonic() - began, text, broken))
        if outcome == "fail" and len(outcomes) < len(names):
            await _help(trial)
    if trial.process is not None:
        await trial.process.end_all()
    return outcomes


async def _over(trial: Trial, act: Callable[[], Awaitable[None]]) -> str:
    resource = min(trial.plenty)
    pod = await trial.pod({resource: 1})
    listed = {name: set(trial.kubelet.devices(name)) for name in trial.plenty}
    await act()
    took = await trial.well()
    for name, before in listed.items():
        if (now := set(trial.kubelet.devices(name))) != before:
            raise Failed(f"The devices of {name} have other ids: {sorted(now - before)} for {sorted(before - now)}.")
    if pod.phase != "Running":
        raise Failed(f"A pod that ran failed: {pod.message}")
    await trial.again(pod)
    return f"back after {took:.2f} s"


async def _help(trial: Trial) -> None:
    """A plugin that is lost is started anew, or is told by a restart of the kubelet, so that the next scenario says
    something of its own.
    """
    with suppress(Failed):
        if trial.process is not None:
            await trial.process.end(trial.process.newest, signal.SIGKILL)
            await trial.process.start()
        elif trial.plenty:
            await trial.kubelet.restart()
        if trial.plenty:
            await trial.well()


def _process(trial: Trial) -> Process:
    if trial.process is None:
        raise Skipped("needs the plugin's command, to start and end it")
    return trial.process
