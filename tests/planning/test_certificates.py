"""Certificates are renewed in time, seldom, and in an order in which nobody meets one that is not trusted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from planning.certificates import (
    AUTHORITY_LEFT,
    AUTHORITY_LIFE,
    DAY,
    SERVING_LEFT,
    SERVING_LIFE,
    SETTLED,
    Authority,
    Serving,
    Step,
    Stored,
    next_step,
)

HOSTS = frozenset({"berth-webhooks.berth-system.svc"})
START = 1_800_000_000.0
LAG = 1800.0  # how late API servers may hear of the bundle, and replicas of the certificate
FRESH = Stored((Authority("a", START, START + AUTHORITY_LIFE),), Serving("a", START, START + SERVING_LIFE, HOSTS))


def done(step: Step, stored: Stored, now: float, hosts: frozenset[str] = HOSTS) -> Stored:
    """What is stored after a step, without any key."""
    another = Authority(f"at {now}", now, now + AUTHORITY_LIFE)
    match step:
        case Step.KEEP:
            return stored
        case Step.BEGIN:
            return done(Step.ISSUE, Stored((another,)), now, hosts)
        case Step.SUCCEED:
            return replace(stored, authorities=(*stored.authorities, another))
        case Step.ISSUE:
            return replace(stored, serving=Serving(stored.authorities[-1].name, now, now + SERVING_LIFE, hosts))
        case Step.RETIRE:
            return replace(stored, authorities=stored.authorities[-1:])


def names(stored: Stored) -> frozenset[str]:
    return frozenset(each.name for each in stored.authorities)


def step(stored: Stored, now: float, announced: frozenset[str] | None = None) -> Step:
    return next_step(stored, HOSTS, names(stored) if announced is None else announced, now)


@given(st.lists(st.floats(60.0, 12 * DAY), min_size=150, max_size=250))
def test_over_years_no_call_meets_a_certificate_that_is_not_trusted(pauses: list[float]) -> None:
    now, stored, announced = START, Stored(), frozenset[str]()
    before: tuple[float, Stored, frozenset[str]] | None = None  # when and what was replaced last
    steps = []
    for pause in pauses:
        found = next_step(stored, HOSTS, announced, now)
        steps.append(found)
        if found is not Step.KEEP or announced != names(stored):
            before = (now, stored, announced)
        stored = done(found, stored, now)
        announced = names(stored)
        for moment in (now, now + LAG, now + pause):
            late = before is not None and moment < before[0] + LAG and before[1].serving is not None
            known = [(stored, announced), *([before[1:]] if late and before else [])]
            for serves, _ in known:
                for holds, trusts in known:
                    serving = serves.serving
                    assert serving is not None
                    issuer = next(each for each in holds.authorities if each.name == serving.issuer)
                    assert serving.issuer in trusts
                    assert issuer.begins <= moment < issuer.ends
                    assert serving.begins <= moment < serving.ends
        now += pause
    years = (now - START) / (365 * DAY)
    assert steps.count(Step.BEGIN) == 1
    assert steps.count(Step.ISSUE) <= 1 + years * 365 * DAY / (SERVING_LIFE - SERVING_LEFT - 12 * DAY) + years
    assert len(stored.authorities) <= 2


moments = st.floats(START - 900 * DAY, START + 900 * DAY)
authorities = st.builds(Authority, st.sampled_from("abc"), moments, moments)
servings = st.builds(
    Serving, st.sampled_from(["a", "b", "c", ""]), moments, moments, st.sampled_from([HOSTS, frozenset()])
)
storeds = st.builds(Stored, st.lists(authorities, max_size=3).map(tuple), servings | st.none())


@given(storeds, st.frozensets(st.sampled_from("abc")), moments)
def test_from_whatever_is_stored_it_comes_to_rest_with_what_serves(
    stored: Stored, announced: frozenset[str], now: float
) -> None:
    """Expired, not valid yet, of another authority, for other names: a clock that jumped is one cause."""
    for _ in range(12):
        found = next_step(stored, HOSTS, announced, now)
        if found is Step.KEEP and len(stored.authorities) == 1:
            break
        stored = done(found, stored, now)
        announced = names(stored)
        now += 0 if found is not Step.KEEP else SETTLED
    else:
        raise AssertionError("it does not come to rest")
    serving = stored.serving
    assert serving is not None and serving.begins <= now < serving.ends and serving.hosts >= HOSTS
    assert serving.issuer == stored.authorities[-1].name


def test_what_is_fresh_is_kept() -> None:
    assert step(FRESH, START) is Step.KEEP
    assert step(FRESH, START + SERVING_LIFE - SERVING_LEFT - 1) is Step.KEEP
    assert step(FRESH, START + SERVING_LIFE - SERVING_LEFT + 1) is Step.ISSUE


def test_a_successor_signs_only_after_everybody_trusts_it() -> None:
    now = START + AUTHORITY_LIFE - AUTHORITY_LEFT + 1
    serving = Serving("a", now - DAY, now - DAY + SERVING_LIFE, HOSTS)
    old = replace(FRESH, serving=serving)
    assert step(old, now) is Step.SUCCEED
    both = done(Step.SUCCEED, old, now)
    assert step(both, now + SETTLED - 1) is Step.KEEP, "it was announced a moment ago"
    assert step(both, now + 9 * DAY, announced=frozenset("a")) is Step.KEEP, "somebody took it out of a configuration"
    assert step(both, now + SETTLED) is Step.ISSUE
    issued = done(Step.ISSUE, both, now + SETTLED)
    assert step(issued, now + 2 * SETTLED - 1) is Step.KEEP, "replicas may still serve what the old one signed"
    assert step(issued, now + 2 * SETTLED) is Step.RETIRE


def test_other_names_want_another_certificate() -> None:
    assert next_step(FRESH, HOSTS | {"127.0.0.1"}, names(FRESH), START) is Step.ISSUE
    assert next_step(FRESH, frozenset(), names(FRESH), START) is Step.KEEP


def test_a_life_leaves_time_for_its_successor() -> None:
    assert SERVING_LIFE < AUTHORITY_LEFT < AUTHORITY_LIFE
    assert SETTLED < SERVING_LEFT < SERVING_LIFE
