"""The embedded stack as an object: up, down, status, and the handles that tests and benchmarks need.

For the command line, the tests, the demo and the benchmarks. State lives in the data folder alone: any process may make
a `Stack` on the same folder and sees the same thing.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stack import kubeproxy, realnode, temporal
from stack.endpoints import Endpoints
from stack.errors import StackError
from stack.options import UpOptions
from stack.paths import Layout, default_data, locked, read_json, write_atomic
from stack.plan import choose_ports, make_plan, needed_tools
from stack.ports import choose
from stack.proc import begun_with
from stack.process import ProcessSpec
from stack.progress import Progress, Silent
from stack.supervision import Supervised, behind
from stack.tools import Toolbox

_API_KEY = "TEMPORAL_API_KEY"
_CLUSTER = Path(__file__).parent / "manifests" / "cluster.yaml"


class Stack(Supervised):
    """One stack on one data folder."""

    def __init__(self, data: Path | None = None) -> None:
        super().__init__(Layout.of(data or default_data()))

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
            else:
                realnode.clean(self.layout)  # what a supervisor that was killed left behind
            if options.has_real_node:
                realnode.clean_abandoned(self.layout)
            plan = make_plan(self.layout, options, found, ports)
            if plan.without_services:
                shown.finish("kube-proxy", f"left out, so that no Service answers: {plan.without_services}")
            if running:
                self._check_api_key(plan.endpoints)
                if not options.real_node:
                    self._end_node(shown)
            extras = self._extras() if running else []
            self._owner = os.getpid() if options.end_with_caller else None
            self._write_state(plan.endpoints)
            try:
                # A running second half must not be stopped by a plan that holds the first one only.
                self._carry_out([*plan.first, *(plan.second if running else []), *extras], shown, options.start_timeout)
                if options.temporal is None:
                    self._settle_temporal(plan.endpoints)
                if options.cluster is None:
                    self._settle_cluster(plan.endpoints)
                if plan.second and not running:
                    self._carry_out([*plan.first, *plan.second], shown, options.start_timeout)
                if after_up is not None:
                    after_up(plan.endpoints)
                if processes is not None:
                    fresh = list(processes(plan.endpoints))
                    extras = [spec for spec in extras if spec.name not in {each.name for each in fresh}] + fresh
                    extras = [behind(spec, [*plan.first, *plan.second]) for spec in extras]
                    names = {spec.name for spec in extras}
                    self._carry_out([*plan.first, *plan.second, *extras], shown, options.start_timeout, names)
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
            self._stop_supervisor()
            shown.finish("stack", "ended")
        realnode.clean(self.layout)
        return was_running

    def _end_node(self, shown: Progress) -> None:
        """Stops the real node's kubelet and what waits for it, then its pods. containerd ends like everything else."""
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
        kubeproxy.clean(self.layout)

    # ---- what is

    @property
    def endpoints(self) -> Endpoints:
        """What the last `up` chose. Raises StackError if there was none."""
        state = read_json(self.layout.state)
        if not state:
            raise StackError(f"There is no stack in {self.layout.root}.", "Start one with `berth up`.")
        return Endpoints.from_json(state)

    def tool(self, name: str) -> Path:
        """The path of a program, found or built."""
        return Toolbox().ensure([name])[name].path

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

    # ---- settling

    def _write_state(self, endpoints: Endpoints) -> None:
        write_atomic(self.layout.state, json.dumps(endpoints.to_json(), indent=2) + "\n")

    def _environment(self) -> dict[str, str]:
        """A person's own variables for Temporal mean other servers, and with a key of theirs a client speaks TLS to the
        embedded one. The API key of an existing Temporal is handed on here, in memory: it must not get into the plan.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TEMPORAL_")}
        return inherited | _api_key(self.endpoints)

    def _check_api_key(self, endpoints: Endpoints) -> None:
        """Raises StackError if what runs was started with another key: it would go on with that one."""
        told = begun_with(read_json(self.layout.supervisor)["pid"])
        if told.get(_API_KEY) != _api_key(endpoints).get(_API_KEY):
            raise StackError(
                "The stack runs with another Temporal API key, or with one where none is wanted now, or without.",
                "Its processes get a key only from the start: run `berth down`, then `berth up` again.",
            )

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


def _api_key(endpoints: Endpoints) -> dict[str, str]:
    """The key of an existing Temporal, under the name that Temporal's clients look for."""
    name = endpoints.temporal_api_key_env
    return {_API_KEY: os.environ[name]} if name else {}
