"""One order at a time for each cache, and the newest wins, in whatever order they come."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError

from nodeworkers.caches import turns as module
from nodeworkers.caches.turns import Late, Turns

DEADLINE = 10.0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_whatever_the_order_the_newest_is_done_last_and_alone(epochs: list[int], pauses: list[int]) -> None:
    async def run() -> None:
        turns: Turns[int] = Turns()
        arrived: list[int] = []
        begun: list[int] = []
        under_way = 0

        async def work(epoch: int, pause: int) -> int:
            nonlocal under_way
            under_way += 1
            begun.append(epoch)
            assert epoch == max(arrived), "an order is begun that nobody wants any more"
            assert under_way == 1, "two orders for one cache at once"
            try:
                for _ in range(pause):
                    await asyncio.sleep(0)
            finally:
                under_way -= 1
            return epoch

        async def send(epoch: int, before: int, pause: int) -> int | None:
            for _ in range(before):
                await asyncio.sleep(0)
            arrived.append(epoch)
            try:
                return await turns.take("c", epoch, 0, lambda: work(epoch, pause))
            except (ApplicationError, Late):
                return None

        sent = [send(epoch, pauses[at], pauses[-at - 1]) for at, epoch in enumerate(epochs)]
        async with asyncio.timeout(DEADLINE):
            done = await asyncio.gather(*sent)
        assert begun == sorted(begun)
        assert begun[-1] == max(epochs), "the newest is what stays"
        assert [each for each in done if each is not None][-1:] and max(epochs) in done
        assert not turns._turns

    asyncio.run(run())


async def test_caches_do_not_wait_for_each_other() -> None:
    turns: Turns[str] = Turns()
    gate = asyncio.Event()

    async def wait() -> str:
        await gate.wait()
        return "one"

    async def at_once() -> str:
        return "other"

    first = asyncio.create_task(turns.take("a", 1, 0, wait))
    async with asyncio.timeout(DEADLINE):
        assert await turns.take("b", 1, 0, at_once) == "other"
        gate.set()
        assert await first == "one"


async def test_what_is_on_record_counts_after_a_restart() -> None:
    async def work() -> None:
        return None

    turns: Turns[None] = Turns()
    with pytest.raises(Late, match="Order 3 is older than 4") as refused:
        await turns.take("a", 3, 4, work)
    assert refused.value.newest == 4
    await turns.take("a", 4, 4, work)


async def test_a_cancelled_order_is_cancelled_and_no_newer_one_is_claimed() -> None:
    turns: Turns[None] = Turns()
    begun, ended = asyncio.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(DEADLINE)
        finally:
            ended.append(True)

    task = asyncio.create_task(turns.take("a", 1, 0, work))
    async with asyncio.timeout(DEADLINE):
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert ended == [True]


async def test_of_caches_that_are_gone_a_bounded_number_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 3)
    turns: Turns[None] = Turns()

    async def work() -> None:
        return None

    for number in range(9):
        await turns.take(f"c-{number}", 2, 0, work)
    assert list(turns._past) == ["c-6", "c-7", "c-8"]
    with pytest.raises(Late):
        await turns.take("c-8", 1, 0, work)
