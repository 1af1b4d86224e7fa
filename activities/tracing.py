"""One trace for a GPUWorkload's life: its id is the workload's UID, so that every process finds it without being told.

Nothing about traces travels in signals or is kept in histories, and no round can be too early to know of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from opentelemetry import context
from opentelemetry.trace import Link, Tracer, get_current_span
from opentelemetry.util.types import AttributeValue

_TRACE = context.create_key("berth-trace-id")


def trace_id(uid: str) -> int | None:
    """The 128 bits of a workload's UID; None where it is no UUID, as no API server makes one."""
    try:
        return UUID(uid).int or None
    except ValueError:
        return None


def trace_begun() -> int | None:
    """The id of the trace that a span about to start begins, if it is a workload's; for a tracer's id generator."""
    given = context.get_value(_TRACE)
    return given if isinstance(given, int) else None


@contextmanager
def workload_span(
    tracer: Tracer, name: str, uid: str, attributes: dict[str, AttributeValue] | None = None
) -> Iterator[None]:
    """A span of the workload's own trace, with a link to what it is part of here: the round that decided it, say."""
    here = get_current_span().get_span_context()
    token = context.attach(context.set_value(_TRACE, trace_id(uid), context.Context()))
    try:
        with tracer.start_as_current_span(
            name,
            attributes={"gpuworkload.uid": uid, **(attributes or {})},
            links=[Link(here)] if here.is_valid else None,
        ):
            yield
    finally:
        context.detach(token)
