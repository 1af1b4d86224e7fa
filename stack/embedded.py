"""The embedded stack as an object: up, down, status, and the handles that tests and benchmarks need.

For the command line, the tests, the demo and the benchmarks. State lives in the data folder alone: any process may make
a `Stack` on the same folder and sees the same thing.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stack import realnode, temporal
from stack.endpoints import Endpoints
from stack.errors import StackError
from stack.options import UpOptions
from stack.paths import Layout, default_data, is_locked, locked, read_json, write_atomic
from stack.plan import choose_ports, make_plan, needed_tools
from stack.ports import choose
from stack.proc import alive, send, start_time, uptime
from stack.process import Probe, ProcessSpec, ProcessStatus, start_order
from stack.progress import Progress, Silent
from stack.tools import Toolbox

_CLUSTER = Path(__file__).parent / "manifests" / "cluster.yaml"


class Stack:
    """One stack on one data folder."""

    def __init__(self, data: Path | None = None) -> None:
        self.layout = Layout.of(data or default_data())
        self._owner: int | None = None

    # ---- up and down

    def up(
        self,
        options: UpOptions | None = None,
        progress: Progress | None = None,
        processes: Callable[[Endpoints], Sequence[ProcessSpec]] | None = None,
        after_up: Callable[[Endpoints], None] | None = None,
    ) -> Endpoints:
        """Starts whatever of the stack does not run yet, and returns when all of it is ready.

        `after_up` is called when the services are ready, before `processes` is asked for the application's own
        processes. Calling this on a running stack changes what differs and leaves the rest alone.
        """
        options, shown = options or UpOptions(), progress or Silent()
        realnode.prepare(options, shown)
        self.layout.create()
        found = Toolbox(options.tools).ensure(needed_tools(options), shown)
        with locked(self.layout.lock, lambda: shown.update("stack", "waiting for another `berth up` or `down`")):
            running = self.running
            kept = read_json(self.layout.state).get("ports", {})
            ports = kept if running else choose_ports(self.layout, options, kept, default_data())
            if running:  # its own processes hold their ports: only what is missing is chosen
                ports = kept | choose_ports(self.layout, options, {}, default_data()) | kept
            plan = make_plan(self.layout, options, found, ports)
            if not running:
                realnode.clean(self.layout)  # what a supervisor that was killed left behind
            elif not options.real_node:
                self._end_node(shown)
            extras = self._extras() if running else []
            self._owner = os.getpid() if options.end_with_caller else None
            self._write_state(plan.endpoints)
            try:
                # A running second half must not be stopped by a plan that holds the first one only.
                self._carry_out([*plan.first, *(plan.second if running else []), *extras], shown, options)
                if options.temporal is None:
                    self._settle_temporal(plan.endpoints)
                if options.cluster is None:
                    self._settle_cluster(plan.endpoints)
                if plan.second and not running:
                    self._carry_out([*plan.first, *plan.second], shown, options)
                if after_up is not None:
                    after_up(plan.endpoints)
                if processes is not None:
                    fresh = list(processes(plan.endpoints))
                    extras = [spec for spec in extras if spec.name not in {each.name for each in fresh}] + fresh
                    extras = [_behind(spec, [*plan.first, *plan.second]) for spec in extras]
                    self._carry_out(
                        [*plan.first, *plan.second, *extras], shown, options, {each.name for each in extras}
                    )
            except BaseException:
                if not running:
                    self._end(shown)
                raise
        return plan.endpoints

    def down(self, progress: Progress | None = None) -> bool:
        """Ends what `up` started on this folder, in order, and nothing else. False if nothing ran. Keeps all data."""
        shown = progress or Silent()
        if not self.layout.root.is_dir():
            return False
        with locked(self.layout.lock, lambda: shown.update("stack", "waiting for another `berth up` or `down`")):
            return self._end(shown)

    def _end(self, shown: Progress) -> bool:
        was_running = self.running
        if was_running:
            self._end_node(shown)
            shown.update("stack", "ending")
            own = read_json(self.layout.supervisor)
            if own:
                send(own["pid"], own["started"], signal.SIGTERM)
            deadline = time.monotonic() + 60
            while self.running and time.monotonic() < deadline:
                time.sleep(0.05)
            if self.running and own:
                send(own["pid"], own["started"], signal.SIGKILL)  # its children die with it
                while self.running:
                    time.sleep(0.05)
            shown.finish("stack", "ended")
        realnode.clean(self.layout)
        return was_running

    def _end_node(self, shown: Progress) -> None:
        """Stops the real node's kubelet, then its pods, and leaves containerd to be ended like everything else."""
        planned = self._planned()
        if not any(spec.name == realnode.KUBELET for spec in planned):
            return
        shown.update("stack", "ending the node's pods")
        waiting = {realnode.KUBELET}
        for spec in planned:  # in the order of starting, so that one pass finds everything behind the kubelet
            if waiting & set(spec.after):
                waiting.add(spec.name)
        self._adopt([spec for spec in planned if spec.name not in waiting], self._extra_names())
        realnode.end_pods(self.layout, self.endpoints.tools)

    # ---- what is

    @property
    def running(self) -> bool:
        """Whether a supervisor looks after this folder."""
        return is_locked(self.layout.supervisor_lock)

    @property
    def names(self) -> list[str]:
        """The processes of the plan, in the order in which they are started."""
        return [spec.name for spec in self._planned()]

    @property
    def endpoints(self) -> Endpoints:
        """What the last `up` chose. Raises StackError if there was none."""
        state = read_json(self.layout.state)
        if not state:
            raise StackError(f"There is no stack in {self.layout.root}.", "Start one with `berth up`.")
        return Endpoints.from_json(state)

    def status(self) -> list[ProcessStatus]:
        """All processes of the plan, in the order in which they were started."""
        told = read_json(self.layout.processes).get("processes", []) if self.running else []
        known = {each["name"]: each for each in told}
        result = []
        for spec in self._planned():
            value = known.get(spec.name)
            if value is None:
                result.append(ProcessStatus(spec.name, "waiting" if self.running else "stopped", port=spec.port))
                continue
            since = uptime(value["started"]) if value["started"] is not None else None
            result.append(ProcessStatus(**value, uptime=since))
        return result

    def probe(self) -> list[ProcessStatus]:
        """The status, with the probes of what counts as ready asked anew: what does not answer is `unready`."""
        specs = {spec.name: spec for spec in self._planned()}

        async def ask(status: ProcessStatus) -> ProcessStatus:
            if not status.ready:
                return status
            answers = await asyncio.gather(*(probe.passes(timeout=5) for probe in specs[status.name].ready))
            return status if all(answers) else replace(status, state="unready")

        async def ask_all() -> list[ProcessStatus]:
            return list(await asyncio.gather(*(ask(status) for status in self.status())))

        return asyncio.run(ask_all())

    def process(self, name: str) -> ProcessStatus:
        """One process. Raises StackError if the plan has none of this name."""
        for status in self.status():
            if status.name == name:
                return status
        raise StackError(
            f"The stack in {self.layout.root} has no process {name}.",
            f"Known: {', '.join(spec.name for spec in self._planned()) or 'none'}.",
        )

    def log_file(self, name: str) -> Path:
        """The log of a process (or of `supervisor`)."""
        return self.layout.log / f"{name}.log"

    def pid(self, name: str) -> int:
        """The process id. Raises StackError if it does not run."""
        pid = self.process(name).pid
        if pid is None:
            raise StackError(f"{name} does not run at the moment.", f"Its log is {self.log_file(name)}.")
        return pid

    def tool(self, name: str) -> Path:
        """The path of a program, found or built."""
        return Toolbox().ensure([name])[name].path

    # ---- handles for tests

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Signals a process, by default so that it cannot say goodbye; returns the process id it had."""
        status = self.process(name)
        if status.pid is None or status.started is None or not send(status.pid, status.started, number):
            raise StackError(f"{name} does not run at the moment.", f"Its log is {self.log_file(name)}.")
        return status.pid

    def wait_restarted(self, name: str, old_pid: int, timeout: float = 30.0) -> int:
        """Waits until a process runs and is ready under another process id than the old one; returns the new one."""
        deadline = time.monotonic() + timeout
        while True:
            status = self.process(name)
            if status.ready and status.pid is not None and status.pid != old_pid:
                return status.pid
            if time.monotonic() > deadline:
                raise StackError(
                    f"{name} was not ready again within {timeout:.0f} s ({status.state}).\n{self._tail(name)}",
                    f"Its log is {self.log_file(name)}.",
                )
            time.sleep(0.02)

    def wait_ready(
        self, names: Iterable[str] | None = None, timeout: float = 60.0, shown: Progress | None = None
    ) -> None:
        """Waits until the named processes (all of them if none is named) are ready."""
        progress = shown or Silent()
        wanted = set(names) if names is not None else {spec.name for spec in self._planned()}
        finished: set[str] = set()
        deadline = time.monotonic() + timeout
        while wanted - finished:
            for status in self.status():
                if status.name not in wanted - finished:
                    continue
                if status.ready:
                    finished.add(status.name)
                    progress.finish(status.name, "ready" + (f" on port {status.port}" if status.port else ""))
                elif status.restarts >= 5 or time.monotonic() > deadline:
                    why = f"{status.last_exit}, {status.restarts} times" if status.last_exit else "is not ready in time"
                    raise StackError(
                        f"{status.name} {why}. The end of its log:\n{self._tail(status.name)}",
                        f"The whole log is {self.log_file(status.name)}.",
                    )
                else:
                    progress.update(status.name, status.state)
            if not self.running:
                raise StackError(
                    f"The supervisor of {self.layout.root} ended.\n{self._tail('supervisor')}",
                    f"Its log is {self.log_file('supervisor')}.",
                )
            time.sleep(0.03)

    def add_process(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        ready: Sequence[Probe] = (),
        *,
        after: Sequence[str] | None = None,
        port: int | None = None,
        timeout: float = 60.0,
        stop_timeout: float = 10.0,
    ) -> int:
        """Adds (or replaces) a process under the same supervisor, waits until it is ready, returns its process id.

        It comes after everything else unless `after` says what it needs.
        """
        spec = ProcessSpec(
            name, tuple(map(str, argv)), env or {}, tuple(after or ()), tuple(ready), port, None, stop_timeout
        )
        with locked(self.layout.lock):
            others = [each for each in self._planned() if each.name != name]
            if after is None:
                spec = _behind(spec, [each for each in others if each.name not in self._extra_names()])
            self._adopt([*others, spec], self._extra_names() | {name})
        self.wait_ready([name], timeout)
        return self.pid(name)

    def remove_process(self, name: str) -> None:
        """Ends a process that was added and takes it out of the plan."""
        with locked(self.layout.lock):
            self._adopt([each for each in self._planned() if each.name != name], self._extra_names() - {name})

    def port(self, name: str) -> int:
        """A free port under a name of the caller's, the same one at every call."""
        with locked(self.layout.lock):
            endpoints = self.endpoints
            if name not in endpoints.ports:
                endpoints = replace(endpoints, ports=dict(endpoints.ports) | choose([name], {}))
                self._write_state(endpoints)
            return endpoints.ports[name]

    def kubectl(self, *arguments: str, identity: str = "admin", stdin: str | None = None, check: bool = True) -> str:
        """Runs kubectl under an identity and returns what it printed. Raises StackError with its complaint."""
        kubectl = self.endpoints.tools.get("kubectl") or self.tool("kubectl")
        result = subprocess.run(
            [str(kubectl), "--kubeconfig", str(self.endpoints.kubeconfig(identity)), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and result.returncode != 0:
            raise StackError(f"kubectl {' '.join(arguments)} failed: {result.stderr.strip()}")
        return result.stdout if check else result.stdout + result.stderr

    # ---- the plan and the supervisor

    def _planned(self) -> list[ProcessSpec]:
        return [ProcessSpec.from_json(each) for each in read_json(self.layout.plan).get("processes", [])]

    def _extra_names(self) -> set[str]:
        return set(read_json(self.layout.plan).get("extra", []))

    def _extras(self) -> list[ProcessSpec]:
        names = self._extra_names()
        return [spec for spec in self._planned() if spec.name in names]

    def _write_state(self, endpoints: Endpoints) -> None:
        write_atomic(self.layout.state, json.dumps(endpoints.to_json(), indent=2) + "\n")

    def _carry_out(
        self, specs: list[ProcessSpec], shown: Progress, options: UpOptions, extra: set[str] | None = None
    ) -> None:
        before = {status.name for status in self.status() if status.ready} if self.running else set()
        self._adopt(specs, self._extra_names() if extra is None else extra)
        names = [spec.name for spec in specs]
        self.wait_ready(names, options.start_timeout, _Only(shown, {name for name in names if name not in before}))

    def _adopt(self, specs: list[ProcessSpec], extra: set[str]) -> None:
        """Writes the plan, makes the supervisor follow it, and returns when it has read it."""
        ordered = start_order(specs)
        identifier = secrets.token_hex(8)
        running = self.running
        plan: dict[str, Any] = {
            "id": identifier,
            "processes": [spec.to_json() for spec in ordered],
            "extra": sorted(extra & {spec.name for spec in ordered}),
            "owner": {"pid": self._owner, "started": start_time(self._owner)} if self._owner else None,
        }
        old = read_json(self.layout.plan)
        if running and self._owner is None:
            plan["owner"] = old.get("owner")
        if running and all(old.get(key) == json.loads(json.dumps(plan[key])) for key in ("processes", "extra")):
            return
        write_atomic(self.layout.plan, json.dumps(plan))
        if running:
            own = read_json(self.layout.supervisor)
            send(own["pid"], own["started"], signal.SIGHUP)
        else:
            self._start_supervisor()
        deadline = time.monotonic() + 60
        while read_json(self.layout.processes).get("plan") != identifier:
            if time.monotonic() > deadline or not self._supervisor_alive():
                raise StackError(
                    f"The supervisor of {self.layout.root} does not follow its plan.\n{self._tail('supervisor')}",
                    f"Its log is {self.log_file('supervisor')}.",
                )
            time.sleep(0.01)

    def _supervisor_alive(self) -> bool:
        own = read_json(self.layout.supervisor)
        return bool(own) and alive(own["pid"], own["started"])

    def _start_supervisor(self) -> None:
        home = str(Path(__file__).parent.parent)
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path}
        key = self.endpoints.temporal_api_key_env
        if key:  # handed on in memory only; the application's processes look for it under its usual name
            environment["TEMPORAL_API_KEY"] = os.environ[key]
        self.layout.supervisor.unlink(missing_ok=True)
        with self.log_file("supervisor").open("ab") as log:
            subprocess.run(
                [sys.executable, "-m", "stack.supervisor", str(self.layout.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.layout.root,
                env=environment,
                check=False,
            )
        deadline = time.monotonic() + 20
        while not self._supervisor_alive():
            if time.monotonic() > deadline:
                raise StackError(
                    f"The supervisor of {self.layout.root} did not start.\n{self._tail('supervisor')}",
                    f"Its log is {self.log_file('supervisor')}.",
                )
            time.sleep(0.01)

    def _tail(self, name: str, lines: int = 12) -> str:
        try:
            with self.log_file(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return "  (there is no log yet)"
        return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])

    # ---- settling

    def _settle_temporal(self, endpoints: Endpoints) -> None:
        command = temporal.settle_namespace(endpoints.tools["temporal"], endpoints.temporal_address)
        for _ in range(20):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return
            time.sleep(0.25)
        raise StackError(f"Temporal's namespace could not be set up: {result.stderr.strip()}")

    def _settle_cluster(self, endpoints: Endpoints) -> None:
        """Applies the stack's own roles, and waits for what the default namespace needs before it takes pods."""
        apply = ("apply", "--server-side", "--force-conflicts", "--field-manager=berth-stack", "-f", str(_CLUSTER))
        self.kubectl(*apply)
        self.kubectl("wait", "--for=create", "serviceaccount/default", "-n", "default", "--timeout=60s")


class _Only:
    """Shows progress of some names alone: what already ran is not news."""

    def __init__(self, shown: Progress, names: set[str]) -> None:
        self._shown, self._names = shown, names

    def update(self, name: str, detail: str, done: int = 0, total: int = 0) -> None:
        if name in self._names:
            self._shown.update(name, detail, done, total)

    def finish(self, name: str, detail: str) -> None:
        if name in self._names:
            self._shown.finish(name, detail)


def _behind(spec: ProcessSpec, others: Sequence[ProcessSpec]) -> ProcessSpec:
    """The spec, started after and ended before the services, unless it says itself what it needs."""
    return spec if spec.after else replace(spec, after=tuple(each.name for each in others))
