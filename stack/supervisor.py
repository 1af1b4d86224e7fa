"""The supervisor: a small detached process that keeps the processes of one data folder running.

`python -m stack.supervisor DATA` goes to the background, reads DATA/run/plan.json, starts what it says in order,
restarts what ends, and writes DATA/run/processes.json. SIGHUP: read the plan again and make it so. SIGTERM: end
everything in reverse order and go. Its children die with it, also when it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO

from stack.paths import Layout, read_json, write_atomic
from stack.proc import alive, die_with_parent, start_time
from stack.process import Probe, ProcessSpec, State, start_order

_LOG_LIMIT = 16 * 1024 * 1024
_FIRST_WAIT, _LONGEST_WAIT, _STEADY_AFTER = 0.1, 5.0, 5.0


class Child:
    """One process of the plan: started, watched, started again."""

    def __init__(self, owner: Supervisor, spec: ProcessSpec) -> None:
        self.owner = owner
        self.spec = spec
        self.state: State = "waiting"
        self.pid: int | None = None
        self.started: int | None = None
        self.restarts = 0
        self.last_exit = ""
        self.was_ready = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task = asyncio.create_task(self._run(), name=spec.name)

    def _set(self, state: State) -> None:
        self.state = state
        if state == "ready":
            self.was_ready.set()
        self.owner.write_status()

    async def _run(self) -> None:
        for name in self.spec.after:
            await self.owner.children[name].was_ready.wait()
        wait = _FIRST_WAIT
        while True:
            begun = time.monotonic()
            try:
                await self._once()
            except OSError as error:
                self.last_exit = f"could not be started: {error}"
            wait = _FIRST_WAIT if time.monotonic() - begun > _STEADY_AFTER else min(wait * 2, _LONGEST_WAIT)
            self.restarts += 1
            self.pid = self.started = None
            self._set("crashed")
            self.owner.note(f"{self.spec.name} {self.last_exit}; starting it again in {wait:.1f} s")
            await asyncio.sleep(wait)

    async def _once(self) -> None:
        if self.spec.before and not await Probe("exec", argv=self.spec.before).passes(timeout=10):
            self.owner.note(f"{self.spec.name}: what should precede its start failed: {' '.join(self.spec.before)}")
        with (self.owner.layout.log / f"{self.spec.name}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.spec.cwd or self.owner.layout.root,
                env=os.environ | dict(self.spec.env),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.pid, self.started = self._process.pid, start_time(self._process.pid)
        self._set("starting")
        probing = asyncio.create_task(self._probe())
        try:
            code = await self._process.wait()
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
        self._process = None
        self.last_exit = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    async def _probe(self) -> None:
        pause = 0.05
        for probe in self.spec.ready:
            while not await probe.passes():
                await asyncio.sleep(pause)
                pause = min(pause * 1.3, 0.5)
        self._set("ready")

    async def stop(self) -> None:
        """Ends the process: politely, then after its `stop_timeout` by SIGKILL."""
        process = self._process
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if process is not None and process.returncode is None:
            self._set("stopping")
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self.spec.stop_timeout)
            except TimeoutError:
                self.owner.note(f"{self.spec.name} did not end within {self.spec.stop_timeout:.0f} s: killed")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        self.pid = self.started = None
        self._set("stopped")


class Supervisor:
    """Makes what runs equal to the plan."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.children: dict[str, Child] = {}
        self._plan = ""
        self._owner: dict[str, int] | None = None
        self._ending = asyncio.Event()
        self._reload = asyncio.Event()

    def note(self, text: str) -> None:
        """One line in the supervisor's own log."""
        print(time.strftime("%Y-%m-%dT%H:%M:%S"), text, flush=True)

    def write_status(self) -> None:
        """Tells everybody what runs."""
        processes = [
            {
                "name": child.spec.name,
                "state": child.state,
                "pid": child.pid,
                "started": child.started,
                "restarts": child.restarts,
                "port": child.spec.port,
                "last_exit": child.last_exit,
            }
            for child in self.children.values()
        ]
        with contextlib.suppress(FileNotFoundError):  # the data folder was removed: there is nobody to tell
            write_atomic(self.layout.processes, json.dumps({"plan": self._plan, "processes": processes}))

    async def run(self) -> None:
        """Works until SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        chores = [asyncio.create_task(self._rotate_logs()), asyncio.create_task(self._watch_owner())]
        await self._apply()
        ending = asyncio.create_task(self._ending.wait())
        while not self._ending.is_set():
            reload = asyncio.create_task(self._reload.wait())
            await asyncio.wait({ending, reload}, return_when=asyncio.FIRST_COMPLETED)
            reload.cancel()
            if self._reload.is_set() and not self._ending.is_set():
                self._reload.clear()
                await self._apply()
        for chore in chores:
            chore.cancel()
        self.note("ending")
        await self._stop(list(self.children))
        self.note("ended")

    async def _apply(self) -> None:
        plan = read_json(self.layout.plan)
        specs = {spec.name: spec for spec in start_order([ProcessSpec.from_json(each) for each in plan["processes"]])}
        changed = [name for name, child in self.children.items() if specs.get(name) != child.spec]
        await self._stop(changed)
        for name in changed:
            del self.children[name]
        # In the plan's order; a child may look up those it comes after as soon as its task first runs.
        fresh = {name: self.children.get(name) or Child(self, spec) for name, spec in specs.items()}
        self.children.clear()
        self.children.update(fresh)
        self._plan = plan.get("id", "")
        self._owner = plan.get("owner")
        self.note(f"plan {self._plan}: {', '.join(self.children)}")
        self.write_status()

    async def _stop(self, names: list[str]) -> None:
        """Ends processes in layers: first those that no other of them is waiting behind."""
        left = set(names)
        while left:
            needed = {before for name in left for before in self.children[name].spec.after}
            layer = (left - needed) or left
            await asyncio.gather(*(self.children[name].stop() for name in layer))
            left -= layer

    async def _watch_owner(self) -> None:
        """Ends everything when the plan's owner, if it has one, is gone, or when somebody removed the data folder."""
        while True:
            if not self.layout.supervisor.exists():
                self._ending.set()
                return
            owner = self._owner
            if owner is not None and not alive(owner["pid"], owner["started"]):
                self.note(f"process {owner['pid']}, which wanted this stack, is gone")
                self._ending.set()
                return
            await asyncio.sleep(0.5)

    async def _rotate_logs(self) -> None:
        """Keeps every log bounded. The children append, so a copy of the end and a cut are all it takes."""
        while True:
            await asyncio.sleep(1)
            for log in self.layout.log.glob("*.log"):
                with contextlib.suppress(OSError):
                    if log.stat().st_size > _LOG_LIMIT:
                        with log.open("rb") as file:
                            file.seek(-_LOG_LIMIT, os.SEEK_END)
                            write_atomic(log.with_suffix(".log.1"), file.read(_LOG_LIMIT))
                        os.truncate(log, 0)


def _detach() -> None:
    """Leaves the caller's session; the caller's child ends at once and this process belongs to init."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)


def _claim(layout: Layout) -> IO[str] | None:
    """The lock that says a supervisor runs; None if one does already."""
    lock = layout.supervisor_lock.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def main() -> None:
    """Entry point: `python -m stack.supervisor DATA`."""
    layout = Layout.of(Path(sys.argv[1]))
    _detach()
    lock = _claim(layout)
    if lock is None:
        return
    os.chdir(layout.root)
    own = {"pid": os.getpid(), "started": start_time(os.getpid())}
    write_atomic(layout.supervisor, json.dumps(own))
    try:
        asyncio.run(Supervisor(layout).run())
    finally:
        layout.supervisor.unlink(missing_ok=True)
        lock.close()


if __name__ == "__main__":
    main()
