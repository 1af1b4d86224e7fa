"""Keeps the webhooks' certificates: made, renewed, and trusted by the webhook configurations. For the one that leads.

When is decided in `planning.certificates`. The names to serve for stand in the configurations themselves: a Service in
a cluster, an address on the embedded stack.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from controller.webhooks.material import SECRET_NAME, SECRET_NAMESPACE, Material, blocks, fingerprint
from controller.webhooks.service import Webhooks
from kube.client import KubeClient
from kube.errors import Conflict, KubeError, NotFound
from kube.resources import MUTATING_WEBHOOKS, SECRETS, VALIDATING_WEBHOOKS, Resource
from planning.certificates import Authority, Serving, Step, Stored, next_step

log = logging.getLogger(__name__)

CONFIGURATIONS = "berth-webhooks"
# The configurations are not watched: somebody who applies them anew without a bundle waits for so long.
LOOK = 60.0
_ISSUE_SECONDS = 30.0


class IssueError(Exception):
    """No certificate could be made; says why, and nothing of any key."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A webhook configuration as it was read."""

    resource: Resource
    raw: Mapping[str, Any]

    @property
    def clients(self) -> list[dict[str, Any]]:
        hooks = self.raw.get("webhooks") or []
        return [hook.get("clientConfig") or {} for hook in hooks]

    def trusting(self, bundle: str) -> dict[str, Any] | None:
        """A merge patch after which every webhook trusts the bundle; None where all do."""
        if all(client.get("caBundle") == bundle for client in self.clients):
            return None
        hooks = [
            {**hook, "clientConfig": {**(hook.get("clientConfig") or {}), "caBundle": bundle}}
            for hook in self.raw["webhooks"]
        ]
        return {"metadata": {"resourceVersion": self.raw["metadata"]["resourceVersion"]}, "webhooks": hooks}


class Keeper:
    """`run` looks now, when the Secret changes, and every minute. `trouble` says what keeps it from its work."""

    def __init__(self, kube: KubeClient, webhooks: Webhooks, *, clock: Callable[[], float] = time.time) -> None:
        self.trouble = ""
        self._kube = kube
        self._webhooks = webhooks
        self._clock = clock
        self._read: tuple[Material, Stored] | None = None

    async def run(self) -> None:
        while True:
            self._webhooks.renewed.clear()
            trouble = ""
            try:
                trouble = await self.look()
            except Conflict:
                pass  # somebody else wrote; the watch brings it, or the next look finds it
            except (KubeError, IssueError) as failed:
                trouble = str(failed)
            if trouble and trouble != self.trouble:
                log.warning("webhook certificates: %s", trouble)
            self.trouble = trouble
            try:
                async with asyncio.timeout(LOOK):
                    await self._webhooks.renewed.wait()
            except TimeoutError:
                continue

    async def look(self) -> str:
        """One look, one step at most. Returns what is missing, '' if nothing is."""
        await self._webhooks.secret.synced.wait()
        configurations = await self._configurations()
        if not configurations:
            return f"webhook configurations {CONFIGURATIONS} are not installed (deploy/webhooks): nothing is checked"
        kept = next(iter(self._webhooks.secret.items.values()), None)
        if kept is None:
            return f"Secret {SECRET_NAMESPACE}/{SECRET_NAME} is not there: apply deploy/webhooks"
        hosts = frozenset(host for each in configurations for client in each.clients if (host := host_of(client)))
        stored = await self._stored(kept.material)
        material, now = kept.material, self._clock()
        step = next_step(stored, hosts, announced(configurations), now)
        if step is not Step.KEEP:
            material, stored = await issue(step, material, hosts, now)
            body = {"metadata": {"resourceVersion": kept.version}, "data": material.data()}
            await self._kube.merge_patch(SECRETS, SECRET_NAME, SECRET_NAMESPACE, body)
            self._read = material, stored
            log.info("webhook certificates: %s", step.value)
        bundle = base64.b64encode(material.authorities.encode()).decode()
        for each in configurations:
            patch = each.trusting(bundle)
            if patch is not None:
                await self._kube.merge_patch(each.resource, CONFIGURATIONS, None, patch)
        return ""

    async def _configurations(self) -> list[Configuration]:
        found = []
        for resource in (VALIDATING_WEBHOOKS, MUTATING_WEBHOOKS):
            try:
                found.append(Configuration(resource, await self._kube.get(resource, CONFIGURATIONS)))
            except NotFound:
                continue
        return found

    async def _stored(self, material: Material) -> Stored:
        if self._read is None or self._read[0] != material:
            self._read = await issue(Step.KEEP, material, (), 0.0)
        return self._read[1]


def host_of(client: Mapping[str, Any]) -> str:
    """The name that an API server wants in the certificate."""
    service = client.get("service")
    if service:
        return f"{service['name']}.{service['namespace']}.svc"
    return urlsplit(client.get("url") or "").hostname or ""


def announced(configurations: Iterable[Configuration]) -> frozenset[str]:
    """The authorities that every webhook of every configuration trusts."""
    trusted = [
        {fingerprint(block) for block in blocks(_decoded(client.get("caBundle")))}
        for each in configurations
        for client in each.clients
    ]
    return frozenset(set.intersection(*trusted)) if trusted else frozenset()


async def issue(step: Step, material: Material, hosts: Iterable[str], now: float) -> tuple[Material, Stored]:
    """The material after a step, and its dates. A program of its own does it (`controller.webhooks.issue`)."""
    asked = {"material": asdict(material), "step": step.name, "hosts": sorted(hosts), "now": now}
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controller.webhooks.issue", stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(_ISSUE_SECONDS):
            answer, complaint = await program.communicate(json.dumps(asked).encode())
    except TimeoutError:
        raise IssueError(f"making certificates took more than {_ISSUE_SECONDS:.0f} s") from None
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    if program.returncode:
        last = (complaint.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise IssueError(f"making certificates failed (exit status {program.returncode}): {last[:200]}")
    told = json.loads(answer)
    return Material(**told["material"]), from_json(told["stored"])


def from_json(told: Mapping[str, Any]) -> Stored:
    """What `controller.webhooks.issue` says is stored."""
    serving = told["serving"]
    return Stored(
        tuple(Authority(**each) for each in told["authorities"]),
        Serving(**{**serving, "hosts": frozenset(serving["hosts"])}) if serving else None,
    )


def _decoded(bundle: object) -> str:
    try:
        return base64.b64decode(bundle).decode() if isinstance(bundle, str) else ""
    except (binascii.Error, ValueError):
        return ""
