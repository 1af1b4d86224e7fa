"""The processes of one data folder from outside: what runs, waiting for it, killing it, and steering the supervisor.

For `Stack`, which adds what the processes are. Works from any process, for it only reads and writes the data folder.
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stack.errors import StackError
from stack.paths import Layout, is_locked, locked, read_json, write_atomic
from stack.proc import alive, send, start_time, uptime
from stack.process import Probe, ProcessSpec, ProcessStatus, start_order
from stack.progress import Progress, Silent


class Supervised:
    """The supervised processes of one data folder."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._owner: int | None = None

    # ---- what is

    @property
    def running(self) -> bool:
        """Whether a supervisor looks after this folder."""
        return is_locked(self.layout.supervisor_lock)

    @property
    def names(self) -> list[str]:
        """The processes of the plan, in the order in which they are started."""
        return [spec.name for spec in self._planned()]

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

    # ---- killing and waiting

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
        restarts = {status.name: status.restarts for status in self.status()}
        deadline = time.monotonic() + timeout
        while wanted - finished:
            for status in self.status():
                if status.name not in wanted - finished:
                    continue
                if status.ready:
                    finished.add(status.name)
                    progress.finish(status.name, "ready" + (f" on port {status.port}" if status.port else ""))
                elif status.restarts - restarts.get(status.name, 0) >= 5 or time.monotonic() > deadline:
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

    # ---- processes beside the services

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
                spec = behind(spec, [each for each in others if each.name not in self._extra_names()])
            self._adopt([*others, spec], self._extra_names() | {name})
        self.wait_ready([name], timeout)
        return self.pid(name)

    def remove_process(self, name: str) -> None:
        """Ends a process that was added and takes it out of the plan."""
        with locked(self.layout.lock):
            self._adopt([each for each in self._planned() if each.name != name], self._extra_names() - {name})

    # ---- the plan and the supervisor

    def _planned(self) -> list[ProcessSpec]:
        return [ProcessSpec.from_json(each) for each in read_json(self.layout.plan).get("processes", [])]

    def _extra_names(self) -> set[str]:
        return set(read_json(self.layout.plan).get("extra", []))

    def _extras(self) -> list[ProcessSpec]:
        names = self._extra_names()
        return [spec for spec in self._planned() if spec.name in names]

    def _environment(self) -> dict[str, str]:
        """What all processes inherit, beside what the plan gives each of them."""
        return dict(os.environ)

    def _carry_out(
        self, specs: list[ProcessSpec], shown: Progress, timeout: float, extra: set[str] | None = None
    ) -> None:
        """Makes the plan these specs, and shows what is started for it: what is new, and what is not what it was."""
        same = {spec.name for spec in self._planned() if spec in specs} if self.running else set()
        before = {status.name for status in self.status() if status.ready} & same
        self._adopt(specs, self._extra_names() if extra is None else extra)
        names = [spec.name for spec in specs]
        self.wait_ready(names, timeout, _Only(shown, {name for name in names if name not in before}))

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
        environment = self._environment() | {"PYTHONPATH": path}
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

    def _stop_supervisor(self) -> None:
        """Makes the supervisor end everything in order; if it does not answer it is killed, and they with it."""
        own = read_json(self.layout.supervisor)
        if own:
            send(own["pid"], own["started"], signal.SIGTERM)
        deadline = time.monotonic() + 60
        while self.running:
            if time.monotonic() > deadline and own:
                send(own["pid"], own["started"], signal.SIGKILL)
            time.sleep(0.05)

    def _tail(self, name: str, lines: int = 12) -> str:
        try:
            with self.log_file(name).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return "  (there is no log yet)"
        return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


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


def behind(spec: ProcessSpec, others: Sequence[ProcessSpec]) -> ProcessSpec:
    """The spec, started after and ended before the services, unless it says itself what it needs."""
    return spec if spec.after else replace(spec, after=tuple(each.name for each in others))
