"""Who hears of what: each rule once, and the laws that hold for every sequence of changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controller.digests import (
    JobDigest,
    NodeDigest,
    RequestDigest,
    WorkloadDigest,
    job_digest,
    node_digest,
    request_digest,
    workload_digest,
)
from controller.routing import NOBODY, Route, on_job, on_node, on_request, on_workload, with_order
from controller.sweep import by_workload, repairs
from planning.naming import PREEMPTED_ANNOTATION, WORKLOAD_UID_LABEL

NEW = WorkloadDigest("ns", "w", 1, finished=False, deleting=False, finalizer=False, caught_up=False, expires=None)
JOB = JobDigest("ns", "w-0", "u", "w", 0, "n1", ready=False, finished=False, deleting=False)
NODE = NodeDigest("n1", able=True, fingerprint=1)


def test_a_new_workload_concerns_the_ledger_only() -> None:
    route = on_workload("u", None, NEW, [])
    assert route.ledger
    assert route.workloads == ()


def test_own_status_writes_concern_nobody() -> None:
    assert on_workload("u", NEW, replace(NEW, caught_up=True, finalizer=True), []) == NOBODY


def test_an_edit_reaches_the_ledger_and_an_open_workflow_but_begins_none() -> None:
    route = on_workload("u", NEW, replace(NEW, generation=2), [])
    assert route.ledger
    assert [p.begin for p in route.workloads] == [False]


def test_an_edit_of_a_running_workload_reaches_its_workflow_even_if_that_was_lost() -> None:
    running = replace(JOB, ready=True)
    assert on_workload("u", None, NEW, [running]).workloads == (), "unedited, it has nothing to be told"
    route = on_workload("u", NEW, replace(NEW, generation=2), [running])
    assert [(p.begin, p.node) for p in route.workloads] == [(True, "n1")]


def test_deletion_begins_the_teardown_only_where_there_is_something_to_tear_down() -> None:
    assert [p.begin for p in on_workload("u", NEW, replace(NEW, deleting=True), []).workloads] == [False]
    held = replace(NEW, finalizer=True)
    assert [p.begin for p in on_workload("u", held, replace(held, deleting=True), []).workloads] == [True]


def test_that_a_job_runs_is_news_for_the_ledger_alone() -> None:
    assert on_job(None, JOB, NEW) == NOBODY
    ready = on_job(JOB, replace(JOB, ready=True), NEW)
    assert ready.ledger
    assert ready.workloads == ()
    assert on_job(replace(JOB, ready=True), JOB, NEW) == NOBODY


def test_that_all_pods_of_a_gang_were_created_is_news_for_the_ledger_once() -> None:
    there = replace(JOB, assembled=True)
    assert on_job(JOB, there, NEW) == Route(ledger=True)
    assert on_job(there, there, NEW) == NOBODY
    assert on_job(there, replace(there, ready=True), NEW) == Route(ledger=True), "and that they run"


def test_that_a_stopped_job_was_let_go_of_is_news_for_the_ledger_once_and_its_node_for_nobody() -> None:
    halted = replace(JOB, halted=True)
    assert on_job(JOB, halted, NEW) == Route(ledger=True)
    assert on_job(halted, halted, NEW) == NOBODY
    gone = on_node(NODE, None, lambda _: [JOB, halted])
    assert gone.ledger and len(gone.workloads) == 1


def test_a_digest_tells_of_a_job_that_was_stopped_for_another() -> None:
    suspended = {"type": "Suspended", "status": "True"}
    for marks, status, told in (
        ({}, {"conditions": [suspended]}, False),
        ({PREEMPTED_ANNOTATION: "for another"}, {}, False),
        ({PREEMPTED_ANNOTATION: "for another"}, {"conditions": [suspended], "terminating": 1}, False),
        ({PREEMPTED_ANNOTATION: "for another"}, {"conditions": [suspended]}, True),
    ):
        meta = {"labels": {WORKLOAD_UID_LABEL: "u"}, "annotations": marks}
        digest = job_digest({"metadata": meta, "spec": {}, "status": status})
        assert digest is not None and digest.halted is told


def test_a_gangs_job_tells_when_its_pods_are_there_and_where() -> None:
    raw: dict[str, Any] = {
        "metadata": {
            "labels": {"gpu.warp.dev/workload-uid": "u"},
            "annotations": {"gpu.warp.dev/node": "a", "gpu.warp.dev/places": '[["a",2],["b",1]]'},
        },
        "spec": {"completions": 3},
    }
    told = []
    for status in ({"active": 2}, {"active": 3, "ready": 2}, {"active": 3, "ready": 3}):
        job = job_digest({**raw, "status": status})
        assert job is not None and (job.node, job.nodes) == ("a", ("a", "b"))
        told.append((job.assembled, job.ready))
    assert told == [(False, False), (True, False), (True, True)]
    single = job_digest(
        {"metadata": {**raw["metadata"], "annotations": {"gpu.warp.dev/node": "a"}}, "status": {"active": 1}}
    )
    assert single is not None and not single.assembled and (single.node, single.nodes) == ("a", ())


def test_that_a_job_runs_reaches_a_workflow_that_is_open_since_before() -> None:
    again = replace(JOB, attempt=1)
    for job, workload in ((again, NEW), (again, None), (JOB, replace(NEW, generation=2, caught_up=True))):
        route = on_job(job, replace(job, ready=True), workload)
        assert route.ledger
        assert [p.begin for p in route.workloads] == [False]


def test_a_job_is_followed_from_the_moment_it_ends() -> None:
    running = replace(JOB, ready=True)
    for ended, phase in (
        (replace(JOB, finished=True), "Running"),
        (replace(JOB, finished=True, complete=True), "Succeeded"),
    ):
        route = on_job(running, ended, NEW)
        assert route.ledger
        assert [(p.uid, p.name, p.begin, p.phase) for p in route.workloads] == [("u", "w", True, phase)]
        assert on_job(ended, ended, NEW) == NOBODY


def test_the_end_that_the_ledger_tells_reaches_a_workflow_only_if_one_is_open() -> None:
    running, done = replace(JOB, ready=True), replace(JOB, finished=True, complete=True)
    assert on_job(running, done, NEW, followed=False) == Route(ledger=True)
    for job, workload in (
        (replace(done, attempt=1), NEW),
        (replace(done, complete=False), NEW),
        (done, replace(NEW, generation=2)),
        (done, replace(NEW, deleting=True, finalizer=True)),
    ):
        assert [p.begin for p in on_job(running, job, workload, followed=False).workloads] == [True]
    tombstone = replace(NEW, finished=True)
    assert on_workload("u", NEW, tombstone, [done]) == NOBODY
    (poke,) = on_workload("u", NEW, tombstone, [done], followed=True).workloads
    assert (poke.begin, poke.ended) == (False, True)
    assert on_workload("u", tombstone, replace(tombstone, finalizer=True), [done], followed=True) == NOBODY
    assert on_workload("u", NEW, tombstone, [replace(done, attempt=1)], followed=True) == NOBODY, "it ended it itself"


def test_the_end_of_a_workflow_is_not_disturbed_by_the_job_it_deletes() -> None:
    done = replace(JOB, finished=True, complete=True)
    route = on_job(done, None, NEW)
    assert route.ledger
    assert route.workloads == ()
    assert on_job(done, None, replace(NEW, deleting=True, finalizer=True)).workloads, "a teardown waits for it"


def test_a_label_gives_no_power_over_another_namespace() -> None:
    forged = replace(JOB, namespace="other", finished=True, complete=True)
    assert on_job(None, forged, NEW) == NOBODY
    assert on_job(forged, None, NEW) == NOBODY
    assert on_workload("u", None, NEW, [forged]).workloads == ()
    assert repairs({"u": NEW}, by_workload([forged]), set()).workloads == ()


def test_a_job_seen_before_its_workload_begins_nothing_and_is_found_with_it() -> None:
    ended = replace(JOB, finished=True)
    assert [p.begin for p in on_job(JOB, ended, None).workloads] == [False]
    assert [p.begin for p in on_workload("u", None, NEW, [ended]).workloads] == [True]


def test_an_edit_reaches_a_job_that_is_not_ready_yet() -> None:
    route = on_workload("u", NEW, replace(NEW, generation=2), [JOB])
    assert [(p.begin, p.node) for p in route.workloads] == [(True, "n1")]
    assert on_workload("u", None, NEW, [JOB]).workloads == (), "a new one's Job has nothing to tell yet"


def test_a_job_made_for_a_spec_that_was_edited_meanwhile_is_followed_at_once() -> None:
    edited = replace(NEW, generation=2)
    assert [p.begin for p in on_job(None, JOB, edited).workloads] == [True]
    assert on_job(None, JOB, replace(edited, caught_up=True)) == NOBODY


def test_a_job_that_somebody_takes_away_concerns_its_workload_even_if_nobody_follows_it() -> None:
    going = replace(JOB, deleting=True)
    route = on_job(JOB, going, NEW)
    assert [(p.uid, p.begin) for p in route.workloads] == [("u", True)]
    assert on_job(going, going, NEW) == NOBODY, "once"
    gone = on_job(going, None, NEW)
    assert gone.ledger
    assert [(p.uid, p.begin) for p in gone.workloads] == [("u", True)]


def test_a_job_whose_going_is_no_news_begins_nothing() -> None:
    finished = replace(JOB, finished=True)
    assert on_job(finished, replace(finished, deleting=True), NEW) == NOBODY
    assert on_job(JOB, replace(JOB, deleting=True), replace(NEW, deleting=True, finalizer=True)) == NOBODY
    for old, workload in ((finished, NEW), (JOB, None), (JOB, replace(NEW, deleting=True))):
        route = on_job(old, None, workload)
        assert route.ledger
        assert [p.begin for p in route.workloads] == [False]


def test_those_on_a_node_hear_when_it_can_no_longer_be_relied_on() -> None:
    running = replace(JOB, ready=True)
    jobs = {"n1": [running, replace(JOB, name="w-1", finished=True)]}
    gone = on_node(NODE, None, lambda name: jobs.get(name, []))
    assert gone.ledger
    assert [(p.uid, p.begin) for p in gone.workloads] == [("u", True)]
    unready = on_node(NODE, replace(NODE, able=False, fingerprint=2), lambda _: [JOB])
    assert [p.begin for p in unready.workloads] == [True], "also while its pod is not ready yet"
    assert on_node(NODE, NODE, lambda name: jobs.get(name, [])) == NOBODY
    relabelled = on_node(NODE, replace(NODE, fingerprint=2), lambda name: jobs.get(name, []))
    assert relabelled.ledger
    assert relabelled.workloads == ()


booleans = st.booleans()
workloads = st.builds(
    WorkloadDigest, st.just("ns"), st.just("w"), st.integers(1, 3), booleans, booleans, booleans, booleans, st.none()
)
jobs_of_u = st.lists(
    st.builds(
        JobDigest, st.just("ns"), st.just("w-0"), st.just("u"), st.just("w"), st.integers(0, 3), st.just("n1"),
        booleans, booleans, booleans,
    ),
    max_size=3,
)  # fmt: skip


@given(st.none() | workloads, workloads, jobs_of_u)
def test_a_poke_to_a_tombstone_starts_nothing(
    old: WorkloadDigest | None, new: WorkloadDigest, jobs: list[JobDigest]
) -> None:
    tombstone = replace(new, finished=True)
    assert on_workload("u", old, tombstone, jobs) == NOBODY
    for job in jobs:
        assert on_job(None, job, tombstone).workloads == ()
    assert repairs({"u": tombstone}, by_workload(jobs), set()).workloads == ()


@given(workloads, jobs_of_u)
def test_a_sweep_finds_every_workload_that_should_be_followed_and_is_not(
    workload: WorkloadDigest, jobs: list[JobDigest]
) -> None:
    poked = {p.uid for p in repairs({"u": workload}, by_workload(jobs), set()).workloads if p.begin}
    torn_down = workload.deleting and workload.finalizer
    ended = any(job.finished or job.deleting for job in jobs)
    edited = bool(jobs) and workload.generation > 1 and not workload.caught_up
    assert ("u" in poked) == ((ended or edited or torn_down) and not workload.finished)


def test_a_sweep_leaves_those_alone_that_are_well_followed() -> None:
    running = replace(JOB, ready=True)
    route = repairs({"u": replace(NEW, caught_up=True)}, by_workload([running]), {"u"})
    assert route.workloads == ()


def test_a_sweep_tells_a_workflow_whose_workload_is_gone() -> None:
    assert [(p.uid, p.begin) for p in repairs({}, {}, {"ghost"}).workloads] == [("ghost", False)]


def test_digests_read_what_the_api_server_sends() -> None:
    raw = {
        "metadata": {"namespace": "ns", "name": "w", "generation": 4, "finalizers": ["gpu.warp.dev/finalizer"]},
        "spec": {"ttlSecondsAfterFinished": 60},
        "status": {"phase": "Failed", "observedGeneration": 4, "finishTime": "2026-01-01T00:00:00Z"},
    }
    digest = workload_digest(raw)
    assert digest.finished
    assert digest.finalizer
    assert digest.caught_up
    assert digest.expires == 1767225600.0 + 60


def test_a_job_without_our_labels_is_nobody_s() -> None:
    assert job_digest({"metadata": {"name": "x"}}) is None


def test_node_digest_tells_able_nodes_from_others() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": "8"}}
    able = node_digest({"metadata": {"name": "n"}, "spec": {}, "status": ready})
    out = node_digest(
        {
            "metadata": {"name": "n"},
            "spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]},
            "status": ready,
        }
    )
    assert able.able
    assert not out.able
    assert able.fingerprint != out.fingerprint


# --- orders of nodes -----------------------------------------------------------------------------------------------

REQUEST = RequestDigest("u", frozenset())


def receivers(route: Route) -> list[str]:
    return [poke.receiver for poke in route.workloads]


def test_what_an_autoscaler_says_concerns_the_order_and_nobody_else() -> None:
    said = replace(REQUEST, told=frozenset({"Accepted"}))
    assert on_request(None, REQUEST) == NOBODY, "whoever made it knows"
    assert on_request(said, said) == NOBODY
    for route in (on_request(REQUEST, said), on_request(None, said), on_request(said, None)):
        assert receivers(route) == ["provisioning/u"] and not route.ledger and not route.workloads[0].begin


def test_what_concerns_a_workload_with_an_order_concerns_that_too() -> None:
    route = with_order(on_job(JOB, replace(JOB, ready=True), NEW), "u")
    assert route.ledger and receivers(route) == ["provisioning/u"]
    edited = with_order(on_workload("u", NEW, replace(NEW, generation=2), []), "u")
    assert receivers(edited) == ["gpuworkload/u", "provisioning/u"]
    assert with_order(NOBODY, "u") == NOBODY


def test_a_digest_of_a_request_has_the_conditions_that_are_true() -> None:
    conditions = [{"type": "Accepted", "status": "True"}, {"type": "Provisioned", "status": "False"}]
    raw = {"metadata": {"labels": {WORKLOAD_UID_LABEL: "u"}}, "status": {"conditions": conditions}}
    assert request_digest(raw) == RequestDigest("u", frozenset({"Accepted"}))
    assert request_digest({"metadata": {}}) is None
