"""Has profiles learn from workloads that ended: what the ledger asks for now and then while runs end.

Each profile is written with the version that was looked at, and says itself up to where it has learned; so a write
that is repeated, lost or raced by another worker's counts no run twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from temporalio import activity

from activities.cache import ClusterCache
from activities.sampling import Usages
from activities.signatures import LEARN, Learned
from crds.settings import Settings
from kube.client import KubeClient
from kube.errors import AlreadyExists, Conflict, KubeError, NotFound, Unavailable
from kube.resources import GPUMODELPROFILES
from planning.demand import kind
from planning.jobs import shape_of
from planning.model import WorkloadView
from planning.naming import profile_name
from planning.profile_status import manifest, status_of
from planning.profiles import BATCH, Key, Profile, Run, by_key, expired, fold, next_due, run_of, settled, unlearned
from planning.samples import Usage

log = logging.getLogger(__name__)

CONCURRENCY = 8
# How long a deleted workload that no profile could learn is kept in mind.
KEPT = 3600.0


class Profiles:
    def __init__(self, cache: ClusterCache, kube: KubeClient, usages: Usages) -> None:
        self._cache = cache
        self._kube = kube
        self._usages = usages

    @activity.defn(name=LEARN)
    async def learn(self) -> Learned:
        """Raises Unavailable when the API server cannot be asked; what was not written is learned the next time."""
        await self._cache.wait_synced()
        now, known = time.time(), by_key(self._cache.profiles.items.values())
        ended = [*self._cache.workloads.items.values(), *self._cache.departed.values()]
        # In a thread: after an upgrade there may be many, and the worker's watches must go on meanwhile.
        grown = await asyncio.to_thread(_grown, ended, known, self._cache.settings, self._usages.of, now)
        runs, written = 0, 0
        for begin in range(0, len(grown), CONCURRENCY):
            some = grown[begin : begin + CONCURRENCY]
            told = await asyncio.gather(*(self._write(profile, now) for profile in some), return_exceptions=True)
            for profile, result in zip(some, told, strict=True):
                if isinstance(result, BaseException):
                    raise result
                if result:
                    before = known.get((profile.namespace, profile.model))
                    runs += profile.runs - (before.runs if before else 0)
                    written += 1
                    known[profile.namespace, profile.model] = profile
        await self._forget(known.values(), now)
        self._cache.departed = {
            view.uid: view
            for mark, view in unlearned(self._cache.departed.values(), known, now)
            if mark.told > now - KEPT
        }
        ended = [*self._cache.workloads.items.values(), *self._cache.departed.values()]
        return Learned(runs, written, next_due(ended, self._cache.live_jobs.values(), known, now))

    async def _write(self, profile: Profile, now: float) -> bool:
        """Whether it was written; if not, whoever was faster has the newer truth, or it is refused for now."""
        name, version = profile_name(profile.model), str(profile.resource_version)
        try:
            if not profile.resource_version:
                raw = await self._kube.create(GPUMODELPROFILES, manifest(profile), profile.namespace)
                version = raw["metadata"]["resourceVersion"]
            body = {"metadata": {"resourceVersion": version}, "status": status_of(profile, now)}
            raw = await self._kube.merge_patch(GPUMODELPROFILES, name, profile.namespace, body, subresource="status")
        except Unavailable:
            raise
        except (AlreadyExists, Conflict, NotFound) as raced:
            log.info("GPUModelProfile %s/%s was not written this time: %s", profile.namespace, name, raced)
            return False
        except KubeError as refused:
            log.warning("GPUModelProfile %s/%s: %s", profile.namespace, name, refused)
            return False
        self._cache.profiles.observe(raw)
        return True

    async def _forget(self, profiles: Iterable[Profile], now: float) -> None:
        """Deletes profiles of what nobody has run for so long that nothing is left of it."""
        for profile in [each for each in profiles if each.resource_version and expired(each, now)][:BATCH]:
            name, version = profile_name(profile.model), profile.resource_version
            try:
                await self._kube.delete(
                    GPUMODELPROFILES, name, profile.namespace, uid=profile.uid, resource_version=version
                )
            except (NotFound, Conflict):
                continue
            except Unavailable:
                raise
            except KubeError as refused:
                log.warning("GPUModelProfile %s/%s: %s", profile.namespace, name, refused)


def _grown(
    ended: Iterable[WorkloadView],
    known: dict[Key, Profile],
    settings: Settings,
    usage: Callable[[str], Usage | None],
    now: float,
) -> list[Profile]:
    """The profiles that have something to learn, once they have learned it; so many as are written in one go."""
    runs: dict[Key, list[Run]] = {}
    shape = partial(shape_of, settings=settings)
    for mark, view in unlearned(ended, known, now):
        if view.spec is None or not settled(mark, now):
            continue
        key = view.namespace, view.spec.model_name
        if key not in runs and len(runs) >= BATCH:
            continue
        run = run_of(view, kind(view.spec, shape(view.spec)), usage(view.uid))
        if run is not None:
            runs.setdefault(key, []).append(run)
    return [fold(known.get(key, Profile(*key)), found) for key, found in runs.items()]
