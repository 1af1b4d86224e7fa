"""What a cache's status says: each condition and reason, within the bounds of its schema whatever nodes answered, and
written when it is worth it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crds.kernelcache import MOST_SHOWN, TritonKernelCacheStatus
from planning.caches.model import CacheView, cache_view
from planning.caches.orders import Report
from planning.caches.rollout import Aim, Member, Rollout, Target, reported
from planning.caches.status import PAUSE, Standing, cache_status, news, worth
from planning.times import timestamp

IMAGE = "registry.example/team/cache"
A, B = (f"sha256:{letter * 64}" for letter in "ab")
NOW = 1_000_000.0


def view(status: dict[str, Any] | None = None, **meta: Any) -> CacheView:
    metadata = {"namespace": "ns", "name": "llama", "uid": "u", "generation": 3, "resourceVersion": "7", **meta}
    spec = {"ociImage": {"image": f"{IMAGE}:v1"}}
    return cache_view({"kind": "TritonKernelCache", "metadata": metadata, "spec": spec, "status": status})


def aim(digest: str = A, good: str = "", **changes: Any) -> Aim:
    target = Target(IMAGE, digest)
    return replace(Aim(f"{IMAGE}:v1", target, 0.0, target, Target(IMAGE, good) if good else Target()), **changes)


def member(outcome: Any = "ready", **changes: Any) -> Member:
    serves = A if outcome == "ready" else ""
    reason = "Verified" if outcome == "ready" else ""
    return replace(Member(1, "k", A, outcome, serves, reason, f"it is {outcome}"), **changes)


def standing(members: dict[str, Member], about: Aim | None = None, **changes: Any) -> Standing:
    selected = changes.pop("selected", dict.fromkeys(members, True))
    return replace(Standing(view(), Rollout(about or aim(), members), selected), **changes)


def told(found: Standing) -> dict[str, tuple[str, str, str]]:
    """Each condition: its status, reason and message."""
    return {
        each["type"]: (each["status"], each["reason"], each["message"])
        for each in cache_status(found, NOW)["conditions"]
    }


def short(found: Standing) -> dict[str, tuple[str, str]]:
    return {kind: fact[:2] for kind, fact in told(found).items()}


def test_all_is_well() -> None:
    found = standing({"a": member(), "b": member("incompatible")}, aim(good=A), pods=4)
    status = cache_status(found, NOW)
    assert status["counts"] == {
        "nodes": 2, "ready": 1, "pending": 0, "incompatible": 1, "failed": 0, "outdated": 0, "pods": 4,
    }  # fmt: skip
    assert (status["resolvedDigest"], status["lastKnownGoodDigest"], status["rollout"]) == (A, A, "1/2")
    assert [each["name"] for each in status["failing"]] == ["b"]
    assert short(found) == {
        "Verified": ("True", "Verified"),
        "Ready": ("True", "Ready"),
        "Error": ("False", "None"),
        "Outdated": ("False", "UpToDate"),
    }
    assert "1 node cannot run its kernels" in told(found)["Ready"][2]


@pytest.mark.parametrize("reason", ["NotSigned", "SignatureRefused", "NoPolicy", "PolicyUnreadable"])
def test_what_is_refused_names_the_node(reason: str) -> None:
    found = told(standing({"a": member(), "b": member("failed", reason=reason, message="nobody known")}))
    assert found["Verified"] == ("False", reason, "b: nobody known")
    assert found["Error"] == ("True", reason, "b: nobody known")
    assert found["Ready"] == ("False", "Failing", "1 of 2 nodes cannot prepare it: b: nobody known")


@pytest.mark.parametrize("reason", ["VerificationDisabled", "ValidationSkipped", "UnsignedAllowed"])
def test_what_is_used_unverified_says_so(reason: str) -> None:
    found = told(standing({"a": member(), "b": member(reason=reason)}))
    assert found["Verified"][:2] == ("False", reason) and "b uses it without" in found["Verified"][2]
    assert found["Ready"][:2] == ("True", "Ready")


def test_what_no_node_has_checked_is_unknown() -> None:
    assert short(standing({"a": member("")}))["Verified"] == ("Unknown", "NotChecked")
    adopted = standing({"a": Member(0, "", "unknown", "ready")})
    assert short(adopted)["Verified"] == ("Unknown", "NotChecked"), "what they have is not known"
    assert short(adopted)["Ready"] == ("False", "Preparing")


def test_not_ready_and_why() -> None:
    cases = {
        "NoNodes": standing({}),
        "Queued": standing({"a": member()}, selected={"a": True, "b": True}, queued=True),
        "Preparing": standing({"a": member(), "b": member("")}),
        "Incompatible": standing({"a": member("incompatible"), "b": member("incompatible")}),
        "Failing": standing({"a": member(), "b": member("retrying", message="no answer")}),
        "ImageNotFound": standing({"a": member("")}, trouble=("ImageNotFound", "it is not there")),
    }
    assert {reason: short(found)["Ready"] for reason, found in cases.items()} == {
        reason: ("False", reason) for reason in cases
    }
    assert "a: it is incompatible" in told(cases["Incompatible"])["Ready"][2]


def test_counts_are_told_in_words_that_fit_none_one_and_many() -> None:
    def ready(*members: Member, **changes: Any) -> str:
        return told(standing(dict(zip("abcd", members, strict=False)), **changes))["Ready"][2]

    waits, fails = member(""), member("failed", message="no disk")
    assert ready(waits) == "its only node cannot mount it yet"
    assert ready(waits, waits) == "0 of 2 nodes can mount it"
    assert ready(member(), waits, waits) == "1 of 3 nodes can mount it"
    assert ready(member()) == "1 node can mount it"
    assert ready(member(), member()) == "2 nodes can mount it"
    assert ready(fails) == "its only node cannot prepare it: a: no disk"
    assert ready(member(), fails) == "1 of 2 nodes cannot prepare it: b: no disk"
    assert ready(fails, fails, fails) == "3 of 3 nodes cannot prepare it: a: no disk (and 2 more nodes)"

    leaving = {"selected": {}, "view": view(deletionTimestamp="2026-01-01T00:00:00Z")}
    busy = member("busy", digest="", pods=1)
    assert ready(busy, **leaving).startswith("1 pod has it mounted on a: it goes once it is gone, or ")
    assert ready(busy, busy, **leaving).startswith("2 pods have it mounted on a, b: it goes once they are gone, or ")

    old = member("", serves=B)
    assert told(standing({"a": old}))["Outdated"][2] == f"1 node still has another digest than {A}"
    assert told(standing({"a": old, "b": old}))["Outdated"][2] == f"2 nodes still have another digest than {A}"


def test_a_node_that_was_never_told_is_pending() -> None:
    status = cache_status(standing({"a": member()}, selected={"a": True, "b": False}), NOW)
    assert (status["counts"]["pending"], status["rollout"]) == (1, "1/2")


def test_what_is_checked_anew_stays_ready_meanwhile() -> None:
    again = standing({"a": member("", serves=A, reason=""), "b": member()})
    assert short(again)["Ready"] == ("True", "Ready")
    other = standing({"a": member("", serves=B, reason=""), "b": member()})
    assert short(other)["Ready"] == ("False", "Preparing")


def test_trouble_is_an_error_and_what_is_ready_stays_ready() -> None:
    found = short(standing({"a": member()}, trouble=("RegistryAway", "no answer")))
    assert (found["Error"], found["Ready"]) == (("True", "RegistryAway"), ("True", "Ready"))


def test_what_was_given_up_names_both_digests_and_the_node() -> None:
    given_up = aim(good=A, latest=Target(IMAGE, B), rejected=B, why="a: nobody known has signed it")
    found = told(standing({"a": member()}, given_up))
    assert found["Error"][:2] == ("True", "RolledBack")
    assert all(part in found["Error"][2] for part in (A, B, "a: nobody known"))
    assert found["Outdated"][:2] == ("True", "TagMoved")


def test_failed_is_worse_than_retrying_and_others_are_counted() -> None:
    members = {"a": member("retrying"), "b": member("failed", reason="TooLarge"), "c": member("failed")}
    found = told(standing(members))
    assert found["Error"] == ("True", "TooLarge", "b: it is failed (and 1 more node)")
    failing = cache_status(standing(members), NOW)["failing"]
    assert [(each["name"], each["reason"]) for each in failing] == [
        ("b", "TooLarge"),
        ("c", "Failed"),
        ("a", "Retrying"),
    ]
    assert told(standing({"a": member("retrying")}))["Error"][1] == "Retrying"


def test_nodes_with_another_digest_are_counted() -> None:
    members = {"a": member("", serves=B), "b": member()}
    assert short(standing(members))["Outdated"] == ("True", "RollingOut")


def test_a_deletion_says_who_keeps_it() -> None:
    leaving = view(deletionTimestamp="2026-01-01T00:00:00Z")
    busy = {f"n{number}": member("busy", digest="", pods=2) for number in range(5)}
    found = told(standing(busy, selected={}, view=leaving))["Ready"]
    assert found[:2] == ("False", "InUse")
    assert "10 pods" in found[2] and "n0, n1, n2 and 2 more" in found[2] and "tkm.io/force-delete=true" in found[2]
    waits = told(standing({"a": member("", digest="")}, selected={}, view=leaving))["Ready"]
    assert waits == ("False", "Deleting", "waiting for a to let go of it")
    assert told(standing({}, view=leaving))["Ready"][2] == "no node has it any more"


def test_a_moment_of_change_stays_while_the_value_does() -> None:
    first = cache_status(standing({"a": member("")}), NOW)
    later = cache_status(standing({"a": member()}, view=view(first)), NOW + 60)
    moments = {each["type"]: each["lastTransitionTime"] for each in later["conditions"]}
    assert moments["Ready"] == timestamp(NOW + 60)
    assert moments["Error"] == timestamp(NOW)


def test_it_is_written_at_once_where_it_is_news_and_else_after_a_pause() -> None:
    first = cache_status(standing({"a": member(""), "b": member("")}), NOW)
    assert worth(view(), first, NOW) == 0.0
    shown = view({**{key: value for key, value in first.items() if value is not None}, "updated": timestamp(NOW)})
    assert worth(shown, first, NOW) is None and news(shown, first) == []
    counts = {**first, "counts": {**first["counts"], "pods": 9}}
    assert worth(shown, counts, NOW) == PAUSE
    assert worth(shown, counts, NOW + PAUSE / 2) == PAUSE / 2
    assert worth(shown, counts, NOW + PAUSE) == 0.0
    assert worth(shown, counts, NOW - 3600) == 0.0, "one that is of the future does not count"
    ready = cache_status(standing({"a": member(), "b": member()}, view=shown), NOW)
    assert worth(shown, ready, NOW) == 0.0
    assert {each["type"] for each in news(shown, ready)} == {"Verified", "Ready"}
    without = cache_status(standing({}, Aim(), view=shown), NOW)
    assert without["resolvedDigest"] is None and worth(shown, without, NOW) == 0.0, "what is no longer so is taken away"


NAMES = st.sampled_from([f"node-{number}" for number in range(40)])
MEMBERS = st.builds(
    Member,
    epoch=st.just(1),
    key=st.just("k"),
    digest=st.sampled_from(["", A, B, "unknown"]),
    serves=st.sampled_from(["", A, B]),
)
SAID = st.builds(
    Report,
    node=st.just(""),
    epoch=st.just(1),
    outcome=st.sampled_from(["ready", "incompatible", "failed", "retrying", "busy", "removed"]),
    serves=st.sampled_from(["", A, B]),
    reason=st.sampled_from(["", "Verified", "NotSigned", "UnsignedAllowed", "not for people!", "R" * 400]) | st.text(),
    message=st.text(max_size=2000) | st.just("m" * 9000),
    pods=st.integers(0, 2**20),
)
TARGETS = st.sampled_from([Target(), Target(IMAGE, A), Target(IMAGE, B)])
AIMS = st.builds(
    Aim,
    reference=st.sampled_from(["", "r" * 600]),
    latest=TARGETS,
    goal=TARGETS,
    good=TARGETS,
    rejected=st.sampled_from(["", B]),
    why=st.text(max_size=512),
)


@settings(max_examples=200, deadline=None)
@given(
    about=AIMS,
    members=st.dictionaries(NAMES, st.tuples(MEMBERS, st.none() | SAID), max_size=30),
    selected=st.dictionaries(NAMES, st.booleans(), max_size=30),
    trouble=st.none() | st.just(("RegistryAway", "t" * 3000)),
    deleting=st.booleans(),
    shown=st.none() | st.dictionaries(st.text(max_size=5), st.integers()),
)
def test_whatever_nodes_say_the_status_is_one_that_the_api_server_takes(
    about: Aim,
    members: dict[str, tuple[Member, Report | None]],
    selected: dict[str, bool],
    trouble: tuple[str, str] | None,
    deleting: bool,
    shown: dict[str, Any] | None,
) -> None:
    rollout = Rollout(about, {name: each for name, (each, _) in members.items()})
    for name, (_, said) in members.items():
        rollout = rollout if said is None else reported(rollout, replace(said, node=name))
    meta = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {}
    found = Standing(view(shown, **meta), rollout, selected, 7, trouble)
    status = cache_status(found, NOW)
    parsed, problem = TritonKernelCacheStatus.validated({**status, "updated": timestamp(NOW)}, "status")
    assert parsed is not None, problem
    counts = status["counts"]
    assert (
        counts["nodes"] == len(selected) == sum(counts[each] for each in ("ready", "pending", "incompatible", "failed"))
    )
    assert len(status["failing"]) <= MOST_SHOWN
    assert worth(found.view, status, NOW) in (None, 0.0)
    assert worth(view({key: value for key, value in status.items() if value is not None}), status, NOW) is None
