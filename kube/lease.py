"""Leader election on a Lease (coordination.k8s.io/v1), by client-go's rules.

For the controller: of several replicas one leads. Clocks of machines are never compared: a lease has expired when it
did not change for its duration by this process' monotonic clock, or when its holder is known to have ended. Writes
carry the resourceVersion as precondition.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from kube.resources import LEASES

log = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """The lease could not be renewed in time, or somebody else holds it; what was led has been stopped."""


class LeaderElector:
    """One candidate. `identity` must differ between processes, also between a process and its successor; a process may
    keep it, for what it led has ended when it stands again.

    lease_seconds: others may take over when the lease has not changed for so long. renew_deadline: this leader gives up
    when it did not renew for so long; the difference is what it has to stop its work. retry: pause between attempts.
    has_ended: whether the holder of this identity is known to do nothing any more, so that nobody need wait for it.
    """

    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        *,
        lease_seconds: float = 15.0,
        renew_deadline: float = 10.0,
        retry: float = 2.0,
        has_ended: Callable[[str], bool] = lambda _: False,
    ) -> None:
        if not 0 < retry < renew_deadline < lease_seconds:
            raise ValueError("a lease needs 0 < retry < renew_deadline < lease_seconds")
        if not identity:
            raise ValueError("a candidate needs an identity")
        self.identity = identity
        self.holder = ""
        self.trouble = ""  # why it cannot be told who leads; '' while the lease can be read
        self._client = client
        self._namespace = namespace
        self._name = name
        self._lease_seconds = lease_seconds
        self._renew_deadline = renew_deadline
        self._retry = retry
        self._has_ended = has_ended
        self._spec: dict[str, Any] = {}
        self._version = ""
        self._seen_at = 0.0  # when the lease was last seen to change
        self._renewed_at = 0.0  # when the last successful renewal was asked for
        self._holding = False

    @property
    def is_leader(self) -> bool:
        """Whether the lease is held and was renewed in time, to the moment: false also right after a stall."""
        return self._holding and time.monotonic() < self._renewed_at + self._renew_deadline

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Waits to become the leader, then runs `lead` until it returns (or raises, which is passed on).

        LeadershipLost when the lease was lost; `lead` has been cancelled and awaited by then. When cancelled itself, it
        cancels `lead`, keeps renewing until that has ended, and releases the lease.
        """
        await self._acquire()
        log.info("%s leads (%s/%s)", self.identity, self._namespace, self._name)
        work = asyncio.ensure_future(lead())
        renewing = asyncio.create_task(self._renew())
        finished = False
        try:
            await asyncio.wait({work, renewing}, return_when=asyncio.FIRST_COMPLETED)
            finished = work.done()
            if not finished:
                work.cancel()
                if not (await asyncio.wait({work}, timeout=self._lease_seconds - self._renew_deadline))[0]:
                    log.critical("leadership is lost, but the work did not stop in time; still waiting for it")
        finally:
            try:
                failure = await _end(work)
            finally:
                lost = await _end(renewing)
                await self._release()
            if failure is not None and not finished:
                log.error("the work failed while it was stopped", exc_info=failure)
        if lost is not None:
            raise lost
        await work

    async def _acquire(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._renew_deadline):
                    leads = await self._try()
                self.trouble = ""
                if leads:
                    return
            except (KubeError, TimeoutError) as exc:
                self.trouble = f"cannot get the lease {self._namespace}/{self._name}: {str(exc) or 'no answer'}"
                log.warning("%s", self.trouble)
            await asyncio.sleep(self._retry * random.uniform(1.0, 1.2))

    async def _renew(self) -> None:
        """Renews until that fails for too long, or somebody else has the lease."""
        error: object = "no answer"
        while True:
            await asyncio.sleep(self._retry)
            left = self._renewed_at + self._renew_deadline - time.monotonic()
            if left <= 0:
                raise LeadershipLost(
                    f"the lease {self._namespace}/{self._name} was not renewed for {self._renew_deadline:g} s: {error}"
                )
            try:
                async with asyncio.timeout(left):
                    if await self._try():
                        continue
            except TimeoutError:
                if left >= self._retry:  # else there was no time for an answer, and what was heard before tells more
                    error = "no answer"
            except Exception as exc:  # whatever kept it from renewing, the deadline alone decides
                error = exc
                log.warning("cannot renew the lease %s/%s: %s", self._namespace, self._name, exc)
            if self.holder not in ("", self.identity):
                raise LeadershipLost(f"the lease {self._namespace}/{self._name} is now {self.holder}'s")

    async def _try(self) -> bool:
        """One attempt to get or renew the lease."""
        asked = time.monotonic()
        try:
            if self._holding:  # nobody else writes it, usually: spare the reading
                try:
                    return self._written(await self._write(self._spec, self._version), asked)
                except (Conflict, NotFound):
                    pass
            try:
                lease = await self._client.get(LEASES, self._name, self._namespace)
            except NotFound:
                return self._written(await self._write({}, None), asked)
            self._observe(lease)
            if self.holder not in ("", self.identity) and not self._expired():
                return False
            return self._written(await self._write(self._spec, self._version), asked)
        except (Conflict, AlreadyExists, NotFound):
            return False  # somebody was quicker

    def _expired(self) -> bool:
        """Whether the holder's lease may be taken over."""
        return time.monotonic() >= self._seen_at + self._patience() or self._has_ended(self.holder)

    def _patience(self) -> float:
        """How long the holder's silence must last. Its own duration counts where it is longer than ours."""
        theirs = self._spec.get("leaseDurationSeconds")
        return max(self._lease_seconds, float(theirs) if isinstance(theirs, int) else 0.0)

    def _observe(self, lease: dict[str, Any]) -> None:
        spec = lease.get("spec") or {}
        self._version = lease["metadata"]["resourceVersion"]
        if spec != self._spec or not self._seen_at:
            self._spec = spec
            self._seen_at = time.monotonic()
        holder = str(spec.get("holderIdentity") or "")
        if holder != self.holder:
            log.info("the lease %s/%s is held by %s", self._namespace, self._name, holder or "nobody")
        self.holder = holder
        if holder != self.identity:
            self._holding = False

    def _written(self, lease: dict[str, Any], asked: float) -> bool:
        self._observe(lease)
        self._renewed_at = asked
        self._holding = True
        return True

    async def _write(self, before: dict[str, Any], version: str | None) -> dict[str, Any]:
        """Puts our name in; `version` None creates the lease."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, math.ceil(self._lease_seconds)),
            "renewTime": now,
        }
        if before.get("holderIdentity") != self.identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(before.get("leaseTransitions") or 0) + (1 if before else 0)
        metadata = {"name": self._name, "namespace": self._namespace}
        if version is None:
            body = {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}
            return await self._client.create(LEASES, body, self._namespace)
        body = {"metadata": {"resourceVersion": version}, "spec": spec}
        return await self._client.merge_patch(LEASES, self._name, self._namespace, body)

    async def _release(self) -> None:
        """Gives the lease up so that the next leader need not wait; only where it is still ours."""
        ours, self._holding = self.is_leader, False
        if not ours:
            return
        body = {"metadata": {"resourceVersion": self._version}, "spec": {"holderIdentity": None}}
        try:
            async with asyncio.timeout(self._retry):
                self._observe(await self._client.merge_patch(LEASES, self._name, self._namespace, body))
        except (KubeError, TimeoutError) as exc:
            log.warning("could not release the lease %s/%s: %s", self._namespace, self._name, str(exc) or "no answer")


async def _end(task: asyncio.Future[None]) -> BaseException | None:
    """Cancels a task, waits for it, and returns what it raised of its own."""
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.exception()
