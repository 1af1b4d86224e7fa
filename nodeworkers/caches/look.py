"""What one look at a cache found so far, and what the node says of it in the end. For `preparing.py`, which fills it in
step by step, so that whatever stops it leaves what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nodeworkers.caches.pulling import About
from nodeworkers.caches.stopped import Stopped, later
from nodeworkers.inventory import GPUs
from nodeworkers.store import Cached
from planning.caches.compatibility import Target, Verdict, compatible, on_node
from planning.caches.node_status import Check, Findings, cut
from planning.caches.orders import NodeOrder
from planning.caches.trust import REFUSALS
from planning.caches.trust import Verdict as Trust
from planning.caches.volumes import NodeCache

TOLD = 512  # characters of a reason in the ledger, and of a report's message
_NOT_CHECKED = Check("Unknown", "NotChecked", "It did not come to that.")


@dataclass(slots=True)
class Look:
    """`row` is the cache as the ledger had it at the begin."""

    row: NodeCache
    generation: int = 0
    verified: Check = _NOT_CHECKED
    compatible: Check = _NOT_CHECKED
    hit: Check = _NOT_CHECKED
    signatures: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    about: About = field(default_factory=About)
    doing: Callable[[], str] = lambda: "asking what is wanted"

    def trusted(self, verdict: Trust) -> None:
        """Raises Stopped where the image may not be used, or nobody could say whether it may."""
        if verdict.reason == "VerifierFailed":
            self.verified = Check("Unknown", verdict.reason, verdict.message)
            raise later(verdict.reason, verdict.message)
        self.verified = Check("True" if verdict.verified else "False", verdict.reason, verdict.message)
        if not verdict.admitted:
            raise Stopped("failed", verdict.reason, verdict.message)

    def preflight(self, hardware: GPUs, targets: Sequence[Target]) -> None:
        """Raises Stopped where no GPU of the node can run kernels for these targets."""
        self.verdicts = compatible(hardware.gpus or (), targets)
        fits, message = on_node(self.verdicts)
        self.compatible = Check("True" if fits else "False", "Compatible" if fits else "Incompatible", message)
        if not fits:
            raise Stopped("incompatible", "Incompatible", message)

    def served(self, order: NodeOrder, cached: Cached, mount_path: str) -> NodeCache:
        """The cache as the ledger is to have it: from then on new pods get the image."""
        before = self.row
        good = before.digest if before.serves and before.digest != cached.digest else before.last_known_good
        return replace(
            before,
            state="Ready",
            generation=self.generation,
            digest=cached.digest,
            goal=order.digest,
            mount_path=mount_path,
            size_bytes=cached.size,
            compatible=True,
            reason="",
            last_known_good=good,
            labels=self.about.labels,
            signatures=self.signatures,
        )

    def stopped(self, order: NodeOrder, stopped: Stopped) -> NodeCache:
        """The same after something went wrong. What was served stays, unless that very image is refused now, or fits
        no GPU any more.
        """
        row, same, reason = self.row, self.row.goal == order.digest, cut(stopped.message, TOLD)
        if same and stopped.reason in REFUSALS:
            return replace(row, state="Failed", reason=reason)
        if stopped.outcome == "incompatible" and (same or not row.serves):
            return replace(row, state="Failed", compatible=False, reason=reason)
        if not row.serves:
            return replace(row, state="Failed" if stopped.outcome == "failed" else "Pending", reason=reason)
        return row

    def ready(self, order: NodeOrder, row: NodeCache, stopped: Stopped | None) -> Check:
        """Whether new pods get the cache. `row` is what the ledger has now."""
        if stopped is None:
            return Check("True", "Ready", " ".join(("New pods get it.", *self.about.warnings)))
        if row.serves == order.digest:
            return Check("True", "Ready", f"New pods get it. It could not be checked anew: {stopped.message}")
        if row.serves:
            told = f"New pods get {row.digest} meanwhile, and not {order.digest}: {stopped.message}"
            return Check("True", "PreviousImage", told)
        return Check("False", stopped.reason, stopped.message)

    def findings(
        self, order: NodeOrder, row: NodeCache, ready: Check, kernels: int | None, simulated: bool
    ) -> Findings:
        """What the node says. `kernels` are those of what is served."""
        return Findings(
            generation=self.generation or row.generation,
            target=order.digest,
            digest=row.digest if row.serves else "",
            mount_path=row.mount_path if row.serves else "",
            size_bytes=row.size_bytes if row.serves else 0,
            kernels=kernels,
            gpus=self.verdicts,
            simulated=simulated,
            verified=self.verified,
            compatible=self.compatible,
            hit_predicted=self.hit,
            ready=ready,
        )
