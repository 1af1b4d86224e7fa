"""`berth worker` whose Jobs are created at the rate of minimalkueue's client: 50 a second, after a burst of 100.

A Job's creation is berth's admission. Everything else that berth writes is not limited: on the peer's side the runner
writes finalizers and ends, and Kueue's own client has the same rate. For the benchmark alone; the product has no limit.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from berth.process import ProcessOptions, run_process
from berth.worker_process import serve
from kube.client import KubeClient
from kube.connection import Connection
from kube.resources import JOBS, Resource

PER_SECOND, BURST = 50.0, 100


class Bucket:
    """A token bucket as client-go's: full at first, and who comes when it is empty waits for their own token."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._at = 0.0

    def take(self, now: float) -> float:
        """Takes a token; how many seconds after `now` it is there."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second) - 1
        self._at = now
        return max(0.0, -self._tokens / self._per_second)


class LimitedClient(KubeClient):
    """A client that waits before it creates a Job."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._bucket = Bucket(PER_SECOND, BURST)

    async def create(
        self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None, *, dry_run: bool = False
    ) -> dict[str, Any]:
        if resource == JOBS and not dry_run:
            await asyncio.sleep(self._bucket.take(time.monotonic()))
        return await super().create(resource, body, namespace, dry_run=dry_run)


def main() -> None:
    """Entry point; the options are those of `berth worker`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", type=Path)
    parser.add_argument("--health-port", type=int)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--bind")
    parser.add_argument("--make-current", action="store_true")
    given = parser.parse_args()
    options = ProcessOptions(
        given.kubeconfig, health_port=given.health_port, metrics_port=given.metrics_port, bind=given.bind
    )

    async def work(traced: bool) -> None:
        async with await LimitedClient.connect(options.kubeconfig, user_agent="berth-worker") as kube:
            await serve(kube, options, traced=traced, take_over=given.make_current)

    run_process("berth-worker", options, work)


if __name__ == "__main__":
    main()
