"""The webhook that grants `kyb.ai/prefer-group`: makes the ResourceClaimTemplate that a pod's claim comes from, and
says how the pod is to name it. A template that no pod needs any more is removed by `tidy`.

The API server takes the pod as it came where this fails or takes too long (failurePolicy Ignore): it gets any seat.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterable

import orjson

from controller.webhooks.reviews import Answer, Malformed, answer, malformed, read
from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from kube.resources import PODS, RESOURCECLAIMTEMPLATES
from planning.devices.prefer_group import ANNOTATION, CLAIM, LABEL, Preference, SeatClass, patch, preference, template
from planning.times import seconds

log = logging.getLogger(__name__)

_MAKING = 1.0  # seconds that a template may take to be made; the API server waits 2 s
_KEPT = 3600.0  # seconds that a template is kept for the next pod
_REMEMBERED = 10_000


class SeatPreferences:
    """`classes`: the DeviceClasses of seats that there are now."""

    def __init__(self, kube: KubeClient, classes: Callable[[], Iterable[SeatClass]]) -> None:
        self._kube = kube
        self._classes = classes
        self._made: dict[tuple[str, str], float] = {}  # namespace and name → when, by the monotonic clock

    async def answer(self, body: bytes) -> Answer:
        """The answer to the API server's question about a pod."""
        try:
            asked = read(body)
        except Malformed as wrong:
            return malformed(wrong)
        wanted = None if asked.old else preference(asked.new, self._classes())
        if wanted is None:
            return answer(asked, "Pod", "allowed", {})
        if not asked.dry_run and (why := await self._have(wanted, asked.namespace)):
            return answer(asked, "Pod", "allowed", {"warnings": [f"{ANNOTATION} is not honoured: {why}"]})
        encoded = base64.b64encode(orjson.dumps(patch(asked.new, wanted))).decode()
        return answer(asked, "Pod", "filled_in", {"patchType": "JSONPatch", "patch": encoded})

    async def _have(self, wanted: Preference, namespace: str) -> str:
        """Makes the template if there is none; why it cannot be had, '' if it is there."""
        key = namespace, wanted.template
        made = self._made.get(key)
        if made is not None and time.monotonic() - made < _KEPT / 4:
            return ""
        try:
            async with asyncio.timeout(_MAKING):
                await self._kube.create(RESOURCECLAIMTEMPLATES, template(wanted, namespace), namespace)
        except AlreadyExists:
            pass
        except (KubeError, TimeoutError) as failed:
            why = str(failed) or f"the API server took more than {_MAKING:.0f} s"
            log.warning("the claim template for group %s in namespace %s: %s", wanted.group, namespace, why)
            return why
        if len(self._made) >= _REMEMBERED:
            self._made.clear()
        self._made[key] = time.monotonic()
        return ""

    async def tidy(self, now: float) -> int:
        """Removes templates that are older than an hour and that no pod names; how many. Raises KubeError."""
        found = (await self._kube.list(RESOURCECLAIMTEMPLATES, label_selector=LABEL))[0]
        old = [raw for raw in found if now - (seconds(raw["metadata"].get("creationTimestamp")) or now) > _KEPT]
        gone = 0
        for namespace in sorted({raw["metadata"]["namespace"] for raw in old}):
            pods = (await self._kube.list(PODS, namespace))[0]
            named = {
                claim.get("resourceClaimTemplateName")
                for pod in pods
                for claim in (pod.get("spec") or {}).get("resourceClaims") or ()
                if claim.get("name") == CLAIM
            }
            for raw in old:
                meta = raw["metadata"]
                if meta["namespace"] != namespace or meta["name"] in named:
                    continue
                self._made.pop((namespace, meta["name"]), None)
                try:
                    await self._kube.delete(RESOURCECLAIMTEMPLATES, meta["name"], namespace, uid=meta["uid"])
                    gone += 1
                except (NotFound, Conflict):
                    continue
        return gone
