"""The books: who may take how much, what cohorts lend, whose turn it is, and what is said of wrong quotas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.accelerators import AMD
from planning.model import Lately, QuotaView, Resources, WorkloadView
from planning.queue import in_order
from planning.quotas import FADED, HALF_LIFE, REMEMBERED, Books, recalled, remembered
from planning.turns import WAITING_FOR_QUOTA
from tests.planning.builders import GIB, NOW, job, node, placed, pod, quota, round_of, snapshot, workload

FREE = {"preemptible": True}


def gpus(count: int) -> Resources:
    return Resources(count)


def most(books: Books, namespace: str, *, firm: bool = False) -> int:
    """How many more GPUs the tenant may take."""
    return next(n for n in range(200, -1, -1) if books.short(namespace, gpus(n), firm=firm) is None)


def test_without_a_quota_nothing_is_limited() -> None:
    books = Books([])
    assert books.short("a", gpus(10_000), firm=True) is None and books.told("a") == ()


def test_a_tenant_holds_its_nominal_and_no_more() -> None:
    books = Books([quota("q", "a", "b", gpus=8)])
    books.take("a", gpus(5), firm=True)
    assert most(books, "b") == 3, "its namespaces share it"
    books.give_back("a", gpus(5), firm=True)
    assert most(books, "a") == 8 and most(books, "elsewhere") == 200


def test_what_a_nominal_does_not_name_is_not_limited() -> None:
    books = Books([quota("q", "a", gpus=1)])
    assert books.short("a", Resources(1, 10**9, 2**60), firm=True) is None
    cpu = Books([quota("q", "a", nominal={"cpu": "2", "memory": "1Gi"})])
    assert cpu.short("a", Resources(100, 2000, 2**30), firm=True) is None
    assert cpu.short("a", Resources(1, 2001), firm=True) is not None
    assert cpu.short("a", Resources(1, 1, 2**30 + 1), firm=True) is not None


def test_members_of_a_cohort_lend_each_other_what_they_do_not_use() -> None:
    books = Books([quota("c"), quota("p", "a", gpus=8, cohort="c"), quota("q", "b", gpus=4, cohort="c")])
    assert most(books, "a") == most(books, "b") == 12
    assert most(books, "a", firm=True) == 8 and most(books, "b", firm=True) == 4, "only preemptible work borrows"
    books.take("b", gpus(10), firm=False)
    assert most(books, "a") == 2 and books.borrows(books.tenant("b")) and not books.borrows(books.tenant("a"))


def test_a_cohorts_own_nominal_is_its_members() -> None:
    books = Books([quota("c", gpus=6), quota("p", "a", gpus=2, cohort="c"), quota("q", "b", gpus=0, cohort="c")])
    assert most(books, "a") == most(books, "b") == 8
    assert most(books, "b", firm=True) == 0


def test_limits_of_borrowing_and_lending() -> None:
    kept = quota("p", "a", gpus=8, cohort="c", lendingLimit={"gpus": 3})
    modest = quota("q", "b", gpus=4, cohort="c", borrowingLimit={"gpus": 2})
    greedy = quota("r", "d", gpus=0, cohort="c")
    books = Books([quota("c"), kept, modest, greedy])
    assert most(books, "d") == 7, "three of the first and four of the second"
    assert most(books, "b") == 6
    books.take("d", gpus(7), firm=False)
    assert most(books, "a") == 5, "what it does not lend is always its own"
    assert most(books, "b") == 0


def test_cohorts_within_cohorts() -> None:
    books = Books(
        [
            quota("top", gpus=2),
            quota("left", cohort="top", lendingLimit={"gpus": 1}),
            quota("right", cohort="top"),
            quota("p", "a", gpus=4, cohort="left"),
            quota("q", "b", gpus=4, cohort="right"),
        ]
    )
    assert most(books, "a") == 10, "its own 4, the 2 of the top, the 4 of the right"
    assert most(books, "b") == 7, "its own 4, the 2 of the top, and 1 that the left lends"


def test_the_most_that_can_be_had_knows_what_lies_between() -> None:
    books = Books(
        [
            quota("top"),
            quota("mid", gpus=8, cohort="top", lendingLimit={"gpus": 0}, borrowingLimit={"gpus": 2}),
            quota("other", gpus=9, cohort="top"),
            quota("p", "a", gpus=0, cohort="mid"),
        ]
    )
    assert most(books, "a") == 10
    assert books.attainable("a", gpus(10), firm=False) and not books.attainable("a", gpus(11), firm=False)
    books.take("a", gpus(1), firm=False)
    assert books.attainable("a", gpus(10), firm=False), "what it holds itself may come back"


@pytest.mark.parametrize(
    ("quotas", "name", "words"),
    [
        ([quota("p", "a", gpus=1, cohort="nope")], "p", "spec.cohort: there is no GPUQuota nope"),
        ([quota("p", "a", gpus=1, cohort="q"), quota("q", "b", gpus=1)], "p", "GPUQuota q names namespaces"),
        ([quota("p", cohort="q"), quota("q", cohort="p")], "q", "q → p → q is a circle"),
        ([quota("p", cohort="p")], "p", "p → p is a circle"),
        ([quota("p", "a", gpus=1), quota("q", "b", "a", gpus=1, created=NOW + 1)], "q", "a belongs to GPUQuota p"),
        ([quota("p", "a", gpus=-1)], "p", "spec.nominal.gpus: must be at least 0, not -1"),
        ([quota(f"q{i}", cohort=f"q{i + 1}") for i in range(9)] + [quota("q9")], "q0", "more than 8 cohorts deep"),
    ],
)
def test_a_wrong_quota_is_told_and_the_others_count(quotas: list[QuotaView], name: str, words: str) -> None:
    books = Books([*quotas, quota("other", "z", gpus=2)])
    assert words in str(books.problems[name][0]) and most(books, "z") == 2


def test_who_is_alone_by_mistake_keeps_its_own() -> None:
    books = Books([quota("p", "a", gpus=3, cohort="nope"), quota("q", "b", gpus=8)])
    assert most(books, "a") == 3


def test_all_other_namespaces_may_share_one_quota() -> None:
    books = Books([quota("p", "a", gpus=3), quota("rest", "*", gpus=1)])
    assert most(books, "a") == 3 and most(books, "x") == 1
    books.take("x", gpus(1), firm=True)
    assert most(books, "y") == 0


amounts = st.integers(0, 9)


@st.composite
def trees(draw: st.DrawFn) -> list[QuotaView]:
    cohorts = draw(st.integers(1, 4))
    found = []
    for i in range(cohorts):
        above = {"cohort": f"c{draw(st.integers(0, i - 1))}"} if i and draw(st.booleans()) else {}
        found.append(quota(f"c{i}", gpus=draw(amounts), **above, **draw(limits())))
    for i in range(draw(st.integers(1, 5))):
        above = {"cohort": f"c{draw(st.integers(0, cohorts - 1))}"} if draw(st.booleans()) else {}
        found.append(quota(f"t{i}", f"n{i}", gpus=draw(amounts), **above, **draw(limits())))
    return found


def limits() -> st.SearchStrategy[dict[str, dict[str, int]]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "borrowingLimit": st.fixed_dictionaries({"gpus": amounts}),
            "lendingLimit": st.fixed_dictionaries({"gpus": amounts}),
        },
    )


@given(trees(), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.booleans()), max_size=30))
def test_no_order_of_taking_breaks_a_limit(quotas: list[QuotaView], wants: list[tuple[int, int, bool]]) -> None:
    books = Books(quotas)
    total = sum(q.spec.nominal.gpus or 0 for q in quotas if q.spec)
    taken: list[tuple[str, Resources, bool]] = []
    for who, count, firm in wants:
        if books.short(f"n{who}", gpus(count), firm=firm) is None and f"t{who}" in books.accounts:
            books.take(f"n{who}", gpus(count), firm=firm)
            taken.append((f"n{who}", gpus(count), firm))
    for account in books.accounts.values():
        if not account.tenant:
            continue
        own, nominal = account.used[0], account.nominal[0] or 0
        assert account.firm[0] <= nominal
        if account.cohort is None:
            assert own <= nominal, "nobody above it to borrow from"
        elif account.borrowing[0] is not None:
            assert own <= nominal + account.borrowing[0]
    tenants = [account for account in books.accounts.values() if account.tenant]
    assert sum(account.used[0] for account in tenants) <= total
    for account in tenants:
        others = [a for a in tenants if a is not account]
        lent = sum(max(0, a.used[0] - (a.nominal[0] or 0)) for a in others)
        kept = (account.nominal[0] or 0) if account.cohort is None else account.kept[0]
        assert account.used[0] + books_left(books, account.name) >= min(kept, kept + lent), "what is not lent is there"
    for namespace, need, firm in reversed(taken):
        books.give_back(namespace, need, firm=firm)
    assert all(account.used == [0, 0, 0] and account.firm == [0, 0, 0] for account in books.accounts.values())


def books_left(books: Books, tenant: str) -> int:
    return max(0, books.accounts[tenant].available(0))


# --- the order -----------------------------------------------------------------------------------------------------


def order(*waiting: tuple[str, int], quotas: list[QuotaView], lately: dict[str, Lately] | None = None) -> str:
    """The namespaces in the order in which their workloads get their turn, if each is placed at once."""
    views = [
        workload(f"{namespace}{i}", count, namespace=namespace, created=NOW - 100 + i)
        for i, (namespace, count) in enumerate(waiting)
    ]
    books, found = Books(quotas, [node("n", 100)]), []
    for view in in_order(views, lambda v: (v, gpus(v.spec.gpu_count if v.spec else 0)), books, lately or {}, NOW):
        books.take(view.namespace, gpus(view.spec.gpu_count if view.spec else 0), firm=False)
        found.append(view.namespace)
    return "".join(found)


def test_tenants_take_turns_by_what_they_hold() -> None:
    quotas = [quota("p", "a"), quota("q", "b")]
    assert order(*[("a", 1)] * 4, *[("b", 1)] * 4, quotas=quotas) == "abababab"
    assert order(*[("a", 2)] * 3, *[("b", 1)] * 6, quotas=quotas) == "abbabbabb"


def test_weight_two_holds_twice_as_much() -> None:
    quotas = [quota("p", "a", weight=2), quota("q", "b")]
    assert order(*[("a", 1)] * 6, *[("b", 1)] * 3, quotas=quotas) == "abaabaaba"


def test_who_stays_within_its_nominal_goes_before_who_borrows() -> None:
    quotas = [quota("c"), quota("p", "a", gpus=1, cohort="c"), quota("q", "b", gpus=3, cohort="c")]
    assert order(*[("a", 1)] * 3, *[("b", 1)] * 3, quotas=quotas) == "abbbaa"


def test_what_was_held_lately_counts() -> None:
    quotas = [quota("p", "a"), quota("q", "b")]
    lately = {"p": Lately(0.03, 0.0, NOW)}
    assert order(*[("a", 1)] * 3, *[("b", 1)] * 3, quotas=quotas, lately=lately) == "bbbaaa"
    long_ago = {"p": Lately(0.03, 0.0, NOW - 40 * HALF_LIFE)}
    assert order(*[("a", 1)] * 3, *[("b", 1)] * 3, quotas=quotas, lately=long_ago) == "ababab"


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 10 * HALF_LIFE))
def test_what_was_held_is_between_what_it_was_and_what_it_is(value: float, share: float, passed: float) -> None:
    now = recalled(Lately(value, share, NOW), NOW + passed)
    assert min(value, share) - 1e-9 <= now <= max(value, share) + 1e-9
    assert recalled(Lately(value, share, NOW), NOW - 5) == pytest.approx(value), (
        "a clock that went back changes nothing"
    )


def test_the_ledger_remembers_whom_there_is_something_to_remember_of() -> None:
    books = Books([quota("c"), quota("p", "a", cohort="c"), quota("q", "b")], [node("n", 10)])
    books.take("a", gpus(5), firm=True)
    known = remembered(books, {"q": Lately(0.5, 0.0, NOW - HALF_LIFE), "gone": Lately(1, 1, NOW)}, NOW)
    assert known == {"p": Lately(0.0, 0.5, NOW), "q": Lately(0.25, 0.0, NOW)}


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.floats(0, 40)), max_size=8))
def test_who_holds_nothing_and_whose_share_has_faded_is_forgotten(tenants: list[tuple[float, int, float]]) -> None:
    quotas = [quota(f"q{i}", f"n{i}") for i, _ in enumerate(tenants)]
    books = Books(quotas, [node("n", 24)])
    for i, (_, held, _) in enumerate(tenants):
        books.take(f"n{i}", gpus(held), firm=True)
    before = {f"q{i}": Lately(value, 0.0, NOW - age * HALF_LIFE) for i, (value, _, age) in enumerate(tenants)}
    known = remembered(books, before, NOW)
    for i, (value, held, age) in enumerate(tenants):
        left = value * 0.5**age
        if held or left > FADED * 1.1:
            assert known[f"q{i}"].value == pytest.approx(left, abs=1e-6)
        elif left < FADED * 0.9:
            assert f"q{i}" not in known


def test_of_too_many_tenants_those_who_held_the_most_are_remembered() -> None:
    quotas = [quota(f"q{i:03}", f"n{i:03}") for i in range(REMEMBERED + 40)]
    books = Books(quotas, [node("n", 1000)])
    books.take("n000", gpus(500), firm=True)
    before = {each.name: Lately(i / 1000, 0.0, NOW) for i, each in enumerate(quotas)}
    known = remembered(books, before, NOW)
    assert list(known) == ["q000", *(each.name for each in quotas[-REMEMBERED + 1 :])]


# --- in rounds -----------------------------------------------------------------------------------------------------


def test_a_round_admits_what_the_quota_allows_and_says_what_it_lacks() -> None:
    queue = [workload(f"w{i}", 2, namespace="a") for i in range(3)]
    decision = round_of(snapshot([node("n", 8)], queue, quotas=[quota("q", "a", gpus=5)]))
    assert placed(decision) == {"w0": "n", "w1": "n"}
    assert [(w.uid, w.reason) for w in decision.waiting] == [("w2", WAITING_FOR_QUOTA)]
    assert "GPUQuota q: needs 2 GPUs" in decision.waiting[0].message and "1 GPU left" in decision.waiting[0].message


def test_gpus_of_all_vendors_count_alike() -> None:
    both = node("n", allocatable=Resources.counting([("", 4), (AMD, 4)], 64_000, 256 * GIB, 110))
    queue = [workload(f"w{i}", 2, namespace="a", spec={"gpuResource": AMD} if i % 2 else {}) for i in range(4)]
    stranger = pod("p", "n", namespace="a", requests=Resources(1, pods=1, other_gpus=((AMD, 1),)))
    decision = round_of(snapshot([both], queue, pods=[stranger], quotas=[quota("q", "a", gpus=6)]))
    assert placed(decision) == {"w0": "n", "w1": "n"}
    assert "0 GPUs left; 6 GPUs used" in decision.waiting[0].message
    books = Books([quota("q", "a", gpus=4)], [both])
    books.take("a", Resources(2, gpu_resource=AMD), firm=True)
    assert books.share(books.tenant("a")) == 0.25, "two of eight"


def test_pods_of_others_count_for_their_namespace() -> None:
    quotas = [quota("q", "a", gpus=5)]
    strangers = [pod("p", "n", gpus=4, namespace="a"), pod("cpu", "n", namespace="a")]
    decision = round_of(snapshot([node("n", 8)], [workload("w", 2, namespace="a")], pods=strangers, quotas=quotas))
    assert not decision.assignments and "4 GPUs used" in decision.waiting[0].message


def test_work_that_may_not_be_preempted_is_told_how_to_borrow() -> None:
    quotas = [quota("c", gpus=8), quota("q", "a", gpus=1, cohort="c")]
    firm, free = workload("w", 2, namespace="a"), workload("x", 2, namespace="a", spec=FREE)
    decision = round_of(snapshot([node("n", 8)], [firm, free], quotas=quotas))
    assert (
        placed(decision) == {"x": "n"}
        and "more than the 1 GPU it may ever hold for work" in decision.waiting[0].message
    )


def test_the_first_of_a_tenant_is_not_overtaken_for_ever() -> None:
    running = job("r", "n", gpus=5, namespace="a", ready=True, counted=True)
    held = [workload("r", 5, namespace="a")]
    large, small = workload("large", 8, namespace="a", created=NOW - 50), workload("small", namespace="a", created=NOW)
    quotas = [quota("q", "a", gpus=8)]

    pods = [pod("p", "n", of=running, namespace="a")]

    def decided(*queue: WorkloadView) -> dict[str, str]:
        nodes = [node("n", 8), node("m", 8)]
        return placed(round_of(snapshot(nodes, [*held, *queue], jobs=[running], pods=pods, quotas=quotas)))

    assert decided(large, small) == {}
    assert decided(small) == {"small": "m"}
    stoppable = workload("small", namespace="a", created=NOW, spec=FREE)
    assert decided(large, stoppable), "it can be stopped when the first has its quota"


def test_who_can_never_have_it_holds_up_nobody() -> None:
    queue = [workload("large", 8, namespace="a"), workload("small", 1, namespace="a", created=NOW)]
    decision = round_of(snapshot([node("n", 8)], queue, quotas=[quota("q", "a", gpus=4)]))
    assert placed(decision) == {"small": "n"} and "more than the 4 GPUs it may ever hold" in decision.waiting[0].message
