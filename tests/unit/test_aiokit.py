import asyncio

import pytest
from structlog.testing import capture_logs

from aenv.aiokit import Bounded, TaskSet, all_done
from aenv.errors import TooManyStarts
from aenv.testing.clock import FakeClock, settle


async def _fail() -> None:
    raise ValueError("broken")


class TestTaskSet:
    async def test_a_failure_is_logged_and_counted(self) -> None:
        with capture_logs() as logs:
            async with TaskSet("node") as tasks:
                tasks.spawn(_fail(), name="sweep")
                await settle()
                assert tasks.failures == 1
                assert len(tasks) == 0
        assert [(line["task"], line["log_level"]) for line in logs] == [("node: sweep", "error")]

    async def test_close_cancels_and_waits_for_the_end(self) -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.set()

        tasks = TaskSet("node")
        tasks.spawn(work(), name="watch")
        await settle()
        await tasks.close()
        assert ended.is_set()
        assert tasks.failures == 0

    async def test_a_closed_set_takes_nothing(self) -> None:
        tasks = TaskSet("node")
        await tasks.close()
        await tasks.close()
        with pytest.raises(RuntimeError, match="closed"):
            tasks.spawn(_fail(), name="late")

    async def test_a_task_may_close_its_own_set(self) -> None:
        tasks = TaskSet("node")
        await asyncio.wait_for(tasks.spawn(tasks.close(), name="stop"), 5)

    async def test_shielded_returns_the_result(self) -> None:
        async with TaskSet("api") as tasks:
            assert await tasks.shielded(asyncio.sleep(0, "done"), name="pause") == "done"
            with capture_logs() as logs, pytest.raises(ValueError, match="broken"):
                await tasks.shielded(_fail(), name="pause")
            assert logs == []
            assert tasks.failures == 0

    async def test_shielded_work_outlives_its_caller(self) -> None:
        release, ended = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            await release.wait()
            ended.set()
            raise ValueError("broken")

        with capture_logs() as logs:
            async with TaskSet("api") as tasks:
                caller = asyncio.create_task(tasks.shielded(work(), name="pause"))
                await settle()
                caller.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await caller
                release.set()
                await ended.wait()
                await settle()
                assert tasks.failures == 1
        assert logs[0]["task"] == "api: pause"


class TestAllDone:
    async def test_both_end_whatever_the_other_does(self) -> None:
        ended = []

        async def end(name: str) -> str:
            await asyncio.sleep(0)
            ended.append(name)
            return name

        assert await all_done(end("a"), end("b")) == ("a", "b")
        for works in ((_fail(), end("c")), (end("c"), _fail()), (_fail(), _fail())):
            with pytest.raises(ValueError, match="broken"):
                await all_done(*works)
        assert ended == ["a", "b", "c", "c"]


class TestBounded:
    async def _hold(self, gate: Bounded, release: asyncio.Event, trace: list[int], number: int) -> None:
        async with gate.admitted():
            trace.append(number)
            await release.wait()

    async def test_the_bound_and_the_order(self) -> None:
        clock = FakeClock()
        gate = Bounded(2, wait_s=10, clock=clock)
        trace: list[int] = []
        releases = [asyncio.Event() for _ in range(4)]
        async with TaskSet("starts") as tasks:
            for number in range(4):
                tasks.spawn(self._hold(gate, releases[number], trace, number), name=str(number))
                await settle()
            assert (trace, gate.in_flight, gate.waiting) == ([0, 1], 2, 2)
            releases[1].set()
            await settle()
            assert (trace, gate.in_flight, gate.waiting) == ([0, 1, 2], 2, 1)
            for release in releases:
                release.set()
            await settle()
        assert (trace, gate.in_flight, gate.waiting) == ([0, 1, 2, 3], 0, 0)

    async def test_who_waits_too_long_is_turned_away(self) -> None:
        clock = FakeClock()
        gate = Bounded(1, wait_s=10, clock=clock)
        trace: list[int] = []
        release = asyncio.Event()
        async with TaskSet("starts") as tasks:
            tasks.spawn(self._hold(gate, release, trace, 0), name="first")
            await settle()
            late = asyncio.create_task(self._hold(gate, release, trace, 1))
            await clock.advance(9.9)
            assert not late.done()
            await clock.advance(0.2)
            with pytest.raises(TooManyStarts) as raised:
                await late
            assert raised.value.retry_after_s == 5
            assert (gate.in_flight, gate.waiting) == (1, 0)

    async def test_a_waiter_that_leaves_makes_room(self) -> None:
        clock = FakeClock()
        gate = Bounded(1, wait_s=10, clock=clock)
        trace: list[int] = []
        release = asyncio.Event()
        async with TaskSet("starts") as tasks:
            for number in range(3):
                tasks.spawn(self._hold(gate, release, trace, number), name=str(number))
            await settle()
            waiter = next(task for task in asyncio.all_tasks() if task.get_name() == "starts: 1")
            waiter.cancel()
            await settle()
            release.set()
            await settle()
        assert (trace, gate.in_flight, gate.waiting) == ([0, 2], 0, 0)

    async def test_a_turn_given_to_one_that_just_left_is_passed_on(self) -> None:
        gate = Bounded(1, wait_s=10, clock=FakeClock())
        trace: list[int] = []
        release = asyncio.Event()
        async with TaskSet("starts") as tasks:
            holder = gate.admitted()
            await holder.__aenter__()
            leaver = tasks.spawn(self._hold(gate, release, trace, 1), name="1")
            await settle()
            await holder.__aexit__(None, None, None)
            leaver.cancel()
            await settle()
            assert (gate.in_flight, gate.waiting) == (0, 0)

    def test_a_bound_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            Bounded(0, wait_s=1, clock=FakeClock())
