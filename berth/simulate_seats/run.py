"""Plays requests by each rule for who is active, and reports what became of them: `berth simulate seats`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from berth.demo.report import percentile
from berth.simulate.trace import text_of
from berth.simulate_seats.report import show
from berth.simulate_seats.traces import Trace
from crds.gpuseatprofile import GPUSeatProfileSpec
from planning.devices.seat_profiles import document_of
from planning.seats import rules
from planning.seats.group import Policy, SeatView, policy_of
from planning.seats.residency import bound
from planning.seats.simulation import Outcome, Proxy, simulate
from stack.errors import StackError

_MONDAY = 4 * 86_400.0  # the first one since the epoch: schedules begin with it
_LONGEST_DOCUMENT = 1_000_000  # characters


@dataclass(frozen=True, slots=True)
class SeatOptions:
    """What to play. policies: by the names of rules, in the order to show them."""

    trace: Trace
    seats: tuple[SeatView, ...]
    policies: tuple[Policy, ...]
    proxy: Proxy
    json_file: Path | None = None


def run(options: SeatOptions) -> dict[str, Any]:
    """Prints a table and plots, writes the file; returns what is in it. StackError: the file cannot be written."""
    began = time.monotonic()
    requests = [(at + _MONDAY, number, seconds) for at, number, seconds in options.trace.requests]
    begin = requests[0][0] if requests else _MONDAY
    played = {
        policy.rule: simulate(options.seats, requests, policy, options.proxy, begin=begin)
        for policy in options.policies
    }
    report = {
        "simulated": "servers, switches and proxy; the decisions are those of a node",
        "trace": {"source": options.trace.source, "requests": len(requests)},
        "seats": [_seat(each) for each in options.seats],
        "proxy": {"deadline_seconds": options.proxy.deadline, "queue": options.proxy.queue},
        "lost_percent_allowed": 100 * options.policies[0].lost,
        "policies": {policy.rule: _figures(options.seats, policy, played[policy.rule]) for policy in options.policies},
    }
    show(report, {name: outcome.stays for name, outcome in played.items()}, Console(highlight=False))
    Console(highlight=False).print(f"\n{time.monotonic() - began:.1f} s")
    if options.json_file is not None:
        try:
            options.json_file.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise StackError(
                f"{options.json_file} cannot be written: {error.strerror}.", "Name another file."
            ) from None
    return report


def _seat(seat: SeatView) -> dict[str, Any]:
    return {
        "name": seat.name,
        "park_seconds": seat.park,
        "wake_seconds": seat.wake,
        "priority": seat.priority,
        "weight": seat.weight,
        "batch": seat.batch,
    }


def _figures(seats: Sequence[SeatView], policy: Policy, outcome: Outcome) -> dict[str, Any]:
    length = outcome.seconds or 1.0
    rule = rules.rule_of(policy.rule)
    told = [wait for wait, _ in outcome.told]
    took = [wait for _, wait in outcome.told]
    return {
        **_told([wait for waits in outcome.waits for wait in waits]),
        "refused_requests": sum(outcome.refused),
        "switches": outcome.switches,
        "utilisation_percent": round(100 * outcome.used / length, 3),
        "lost_percent": round(100 * outcome.lost / length, 3),
        "taken_percent": round(100 * outcome.taken / length, 3),
        "simulated_seconds": round(outcome.seconds, 3),
        "longest_possible_seconds": round(bound(seats, policy.lost, rule is not None and rule.patient), 1),
        "expected_wait_seconds": {"told": _mean(told), "took": _mean(took), "times": len(told)},
        "seats": {
            seat.name: {
                **_told(outcome.waits[number]),
                "refused_requests": outcome.refused[number],
                "slot_percent": round(
                    100 * sum(each.end - each.begin for each in outcome.stays if each.seat == number) / length, 3
                ),
            }
            for number, seat in enumerate(seats)
        },
    }


def _told(waits: Sequence[float]) -> dict[str, Any]:
    """The time to first byte that waiting for the slot makes, of requests that were answered; None where none was."""
    return {
        "answered_requests": len(waits),
        "mean_seconds": _mean(waits),
        **{
            f"p{100 * share:g}_seconds": round(percentile(waits, share), 3) if waits else None
            for share in (0.5, 0.9, 0.99)
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 3) if values else None


def policies(names: Sequence[str], profile: Path | None) -> tuple[Policy, ...]:
    """The policies to play: those named, or all for which there is what they need. `profile`: the file of a
    GPUSeatProfile, whose policy says how much switches may take and has the hours of a schedule.

    StackError: what is wrong with it. ValueError: a name is none, or needs what is not there.
    """
    given = _policy(profile) if profile is not None else Policy()
    chosen = names or [name for name in rules.installed() if name != "schedule" or given.hours]
    for name in chosen:
        if name not in rules.installed():
            raise ValueError(f"{name[:64]!r} is none of {', '.join(rules.installed())}")
        if name == "schedule" and not given.hours:
            raise ValueError("schedule needs --profile, the file of a GPUSeatProfile with hours in a policy")
    return tuple(replace(given, rule=name) for name in dict.fromkeys(chosen))


def _policy(path: Path) -> Policy:
    """Of the one entry of a GPUSeatProfile that has a policy."""
    text = text_of(path, "It must be a GPUSeatProfile as YAML.")[:_LONGEST_DOCUMENT]
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StackError(f"{path} is no YAML: {first}.", "It must be one GPUSeatProfile.") from None
    raw, wrong = document_of(document)
    if wrong:
        raise StackError(f"{path} is no GPUSeatProfile: {wrong}.", "It must be one GPUSeatProfile.")
    spec, refused = GPUSeatProfileSpec.parse(raw)
    if spec is None:
        raise StackError(f"{path} is refused: {refused}.", "The API server and nodes would refuse it as well.")
    having = [each.policy for each in spec.profiles if each.policy is not None]
    if len(having) > 1:
        raise StackError(f"{path} has {len(having)} policies.", "Leave one of them in a copy, for one group is played.")
    return policy_of(having[0]) if having else Policy()
