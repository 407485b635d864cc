"""Requests on sandboxes: what each does, what it is refused for, and what happens when several come at once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest
from tests.support.blockd import needs_fuse, until
from tests.support.node_harness import Server, World, open_world

from aenv.errors import (
    Conflict,
    GuestUnresponsive,
    InvalidRequest,
    NoCapacity,
    NotFound,
    OperationFailed,
    SandboxLost,
)
from aenv.node.views import PublicState, SandboxView
from aenv.testing.clock import settle
from aenv.testing.fake_vmm import Failure
from aenv.vmm.contract import CaptureKind

pytestmark = needs_fuse


@pytest.fixture(params=list(CaptureKind))
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with open_world(request.param) as world:
        yield world


@pytest.fixture
async def server(world: World) -> AsyncIterator[Server]:
    server = await world.server()
    yield server
    await server.end()
    assert len(await world.storage.images()) == 0


class TestLife:
    async def test_a_sandbox_runs_until_it_is_killed(self, server: Server, world: World) -> None:
        view = await server.create(metadata={"a": "b"}, timeout_s=60)
        assert view.state is PublicState.RUNNING
        assert view.end_at == world.clock.now() + timedelta(seconds=60)
        assert server.manager.get(view.id) == view
        await server.check()
        await server.manager.kill(view.id)
        with pytest.raises(NotFound):
            server.manager.get(view.id)
        await server.check()

    async def test_a_paused_one_goes_on_where_it_was(self, server: Server, world: World) -> None:
        view = await server.create()
        for number in range(4):
            await world.ask(view, server, f"fill {number} {10 * number} 12")
            await world.ask(view, server, f"write 0 {number + 7}")
            content = await world.ask(view, server, "hash")
            await server.manager.pause(view.id)
            assert server.state(view) is PublicState.PAUSED
            await server.check()
            resumed, was_paused = await server.manager.connect(view.id, 100)
            assert was_paused
            assert resumed.end_at == world.clock.now() + timedelta(seconds=100)
            await server.check()
            assert await world.ask(view, server, "hash") == content
            assert await world.ask(view, server, "read 0") == str(number + 7)

    async def test_snapshots_hold_what_was_at_their_moment(self, server: Server, world: World) -> None:
        view = await server.create()
        expected = {}
        for number in range(4):
            await world.ask(view, server, f"fill {number} {10 * number} 12")
            await world.ask(view, server, f"write 0 {number}")
            snapshot = await server.manager.snapshot(view.id, f"step-{number}")
            expected[f"step-{number}"] = await world.ask(view, server, "hash")
            assert server.manager.list_snapshots(name=f"step-{number}") == [snapshot]
            await server.check()
        assert len(server.manager.list_snapshots(sandbox_id=view.id)) == 4
        await server.manager.kill(view.id)
        for number, (name, content) in enumerate(expected.items()):
            child = await server.create(name)
            assert await world.ask(child, server, "hash") == content
            assert await world.ask(child, server, "read 0") == str(number)
            await server.manager.delete_snapshot(name)
            await server.check()
            await server.manager.pause(child.id)
            await server.manager.connect(child.id, None)
            assert await world.ask(child, server, "hash") == content

    async def test_children_of_a_fork_are_independent(self, server: Server, world: World) -> None:
        source = await server.create(metadata={"run": "1"})
        await world.ask(source, server, "fill 1 0 50")
        content = await world.ask(source, server, "hash")
        children = await server.manager.fork(source.id, 3, 120)
        assert all(isinstance(child, SandboxView) for child in children)
        assert {child.metadata["run"] for child in children} == {"1"}
        await server.check()
        for number, child in enumerate(children):
            await world.ask(child, server, f"fill {number + 5} 0 10")
            await world.ask(child, server, f"write 0 {number}")
        assert await world.ask(source, server, "hash") == content
        await server.manager.kill(source.id)
        hashes = {await world.ask(child, server, "hash") for child in children}
        assert len(hashes) == 3
        await server.manager.pause(children[0].id)
        await server.check()


class TestRefusals:
    async def test_what_a_running_one_refuses(self, server: Server) -> None:
        view = await server.create()
        same, resumed = await server.manager.connect(view.id, None)
        assert (same, resumed) == (view, False)
        for count in (0, 101):
            with pytest.raises(InvalidRequest):
                await server.manager.fork(view.id, count, None)

    async def test_what_a_paused_one_refuses(self, server: Server) -> None:
        manager, view = server.manager, await server.create()
        await manager.pause(view.id)
        for refused in (
            manager.pause(view.id),
            manager.snapshot(view.id, None),
            manager.fork(view.id, 1, None),
            manager.set_timeout(view.id, 10),
        ):
            with pytest.raises(Conflict):
                await refused
        await server.check()

    async def test_what_is_not_there_is_not_found(self, server: Server) -> None:
        manager = server.manager
        for request in (
            manager.connect("i0", None),
            manager.pause("i0"),
            manager.kill("i0"),
            manager.fork("i0", 1, None),
            manager.snapshot("i0", None),
            manager.set_timeout("i0", 1),
            manager.delete_snapshot("nothing"),
            server.create("nothing"),
        ):
            with pytest.raises(NotFound):
                await request

    async def test_the_built_in_template_stays(self, server: Server) -> None:
        with pytest.raises(Conflict):
            await server.manager.delete_snapshot("base")

    async def test_a_name_is_given_once(self, server: Server) -> None:
        first, second = await server.create(), await server.create()
        results = await asyncio.gather(
            server.manager.snapshot(first.id, "name"),
            server.manager.snapshot(second.id, "name"),
            return_exceptions=True,
        )
        assert sorted(type(result) for result in results if isinstance(result, Exception)) == [Conflict]
        assert len(server.manager.list_snapshots()) == 1
        with pytest.raises(Conflict):
            await server.manager.snapshot(first.id, "name")
        await server.check()

    async def test_a_node_that_is_full_says_so(self, server: Server) -> None:
        server.capacity.memory_taken_mib += server.capacity.memory_limit_mib
        with pytest.raises(NoCapacity):
            await server.create()
        server.capacity.memory_taken_mib -= server.capacity.memory_limit_mib
        await server.create()
        await server.check()


class TestAtOnce:
    """Two requests on one sandbox: the second finds what the first left."""

    @staticmethod
    async def held(
        server: Server, call: str, work: Coroutine[Any, Any, Any]
    ) -> tuple[asyncio.Task[Any], asyncio.Event]:
        """Start `work` and return when its call is under way."""
        server.gate.hold[call] = event = asyncio.Event()
        server.gate.reached.clear()
        task = asyncio.ensure_future(work)
        await server.gate.reached.wait()
        return task, event

    @pytest.mark.parametrize("call", ["vm.suspend", "storage.snapshot", "database.write", "edge.withdraw", "vm.stop"])
    async def test_a_kill_during_a_pause_wins(self, server: Server, call: str) -> None:
        view = await server.create()
        pausing, event = await self.held(server, call, server.manager.pause(view.id))
        killing = asyncio.ensure_future(server.manager.kill(view.id))
        await settle()
        assert not killing.done()
        event.set()
        await asyncio.gather(pausing, killing)
        with pytest.raises(NotFound):
            server.manager.get(view.id)
        await server.check()

    async def test_a_connect_during_a_pause_resumes_it(self, server: Server, world: World) -> None:
        view = await server.create()
        pausing, event = await self.held(server, "storage.snapshot", server.manager.pause(view.id))
        connecting = asyncio.ensure_future(server.manager.connect(view.id, 500))
        await settle()
        event.set()
        await pausing
        view, resumed = await connecting
        assert resumed
        assert view.end_at == world.clock.now() + timedelta(seconds=500)
        await server.check()

    async def test_two_pauses_at_once(self, server: Server) -> None:
        view = await server.create()
        results = await asyncio.gather(*(server.manager.pause(view.id) for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), Conflict, Conflict]
        await server.check()

    async def test_two_connects_at_once_resume_once(self, server: Server) -> None:
        view = await server.create()
        await server.manager.pause(view.id)
        results = await asyncio.gather(*(server.manager.connect(view.id, 60) for _ in range(3)))
        assert [resumed for _, resumed in results] == [True, False, False]
        await server.check()

    async def test_two_kills_at_once(self, server: Server) -> None:
        view = await server.create()
        results = await asyncio.gather(*(server.manager.kill(view.id) for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), NotFound, NotFound]

    async def test_a_snapshot_while_it_forks(self, server: Server, world: World) -> None:
        view = await server.create()
        await world.ask(view, server, "fill 3 0 9")
        forking, event = await self.held(server, "storage.snapshot", server.manager.fork(view.id, 2, None))
        snapshotting = asyncio.ensure_future(server.manager.snapshot(view.id, "both"))
        await settle()
        event.set()
        children, snapshot = await forking, await snapshotting
        contents = {
            await world.ask(each, server, "hash") for each in (view, *children, await server.create(snapshot.id))
        }
        assert len(contents) == 1
        await server.check()

    async def test_a_kill_of_the_source_while_children_start(self, server: Server) -> None:
        view = await server.create()
        forking, event = await self.held(server, "driver.restore", server.manager.fork(view.id, 2, None))
        await server.manager.kill(view.id)
        event.set()
        assert len(await forking) == 2
        await server.check()

    async def test_a_kill_while_it_is_created(self, server: Server) -> None:
        creating, event = await self.held(server, "driver.restore", server.create())
        (sandbox,) = server.manager._sandboxes
        killing = asyncio.ensure_future(server.manager.kill(sandbox))
        await settle()
        assert server.manager.sandboxes() == []
        event.set()
        await asyncio.gather(creating, killing, return_exceptions=True)
        assert killing.exception() is None
        await server.check()

    async def test_what_is_deleted_while_a_sandbox_of_it_starts(self, server: Server, world: World) -> None:
        view = await server.create()
        await world.ask(view, server, "fill 3 0 9")
        snapshot = await server.manager.snapshot(view.id, None)
        await server.manager.kill(view.id)
        creating, event = await self.held(server, "storage.open_disk", server.create(snapshot.id))
        await server.manager.delete_snapshot(snapshot.id)
        event.set()
        view = await creating
        expected = await world.ask(view, server, "hash")
        await server.manager.pause(view.id)
        await server.manager.connect(view.id, None)
        assert await world.ask(view, server, "hash") == expected
        await server.check()

    async def test_a_kill_right_after_a_pause_stays_a_kill(self, server: Server) -> None:
        """The capture's way to stable storage must not bring its record back."""
        view = await server.create()
        pausing, event = await self.held(server, "storage.sync_layers", server.manager.pause(view.id))
        await pausing
        killing, deleting = await self.held(server, "database.write", server.manager.kill(view.id))
        event.set()
        await settle()
        deleting.set()
        await killing
        await server.check()

    async def test_requests_to_one_that_ends_meanwhile_are_answered(self, server: Server) -> None:
        view = await server.create()
        requests = [
            server.manager.kill(view.id),
            server.manager.fork(view.id, 1, None),
            server.manager.snapshot(view.id, None),
            server.manager.pause(view.id),
            server.manager.connect(view.id, None),
            server.manager.set_timeout(view.id, 5),
        ]
        results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 10)
        assert [type(result) for result in results] == [type(None), *[NotFound] * 5]
        await server.check()


class TestCallersThatLeave:
    @pytest.mark.parametrize("name", ["create", "pause", "resume", "snapshot", "fork", "kill"])
    async def test_the_work_goes_on(self, server: Server, name: str) -> None:
        running, paused = await server.create(), await server.create()
        await server.manager.pause(paused.id)
        work = {
            "create": lambda: server.create(),
            "pause": lambda: server.manager.pause(running.id),
            "resume": lambda: server.manager.connect(paused.id, None),
            "snapshot": lambda: server.manager.snapshot(running.id, "left"),
            "fork": lambda: server.manager.fork(running.id, 2, None),
            "kill": lambda: server.manager.kill(running.id),
        }[name]
        await server.quiet()
        server.gate.hold["database.write"] = event = asyncio.Event()
        server.gate.reached.clear()
        task = asyncio.ensure_future(work())
        await server.gate.reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        event.set()
        await server.check()
        states = {view.id: view.state for view in server.manager.sandboxes()}
        match name:
            case "create":
                assert len(states) == 3
            case "pause":
                assert states[running.id] is PublicState.PAUSED
            case "resume":
                assert states[paused.id] is PublicState.RUNNING
            case "snapshot":
                assert server.manager.list_snapshots(name="left")
            case "fork":
                assert len(states) == 4
            case "kill":
                assert running.id not in states


class TestGuests:
    """What the agent in the guest does or fails to do."""

    async def test_a_guest_that_cannot_freeze_is_captured_all_the_same(self, server: Server, world: World) -> None:
        view = await server.create()
        agent = world.network.agents[server.manager._sandboxes[view.id].machine.slot.index]
        agent.unfreezable = True
        with pytest.raises(GuestUnresponsive):
            await server.manager.pause(view.id, require_healthy_guest=True)
        await server.check()
        assert server.state(view) is PublicState.RUNNING
        await server.manager.pause(view.id)
        assert server.manager.get(view.id).guest_unresponsive_at_pause
        view, _ = await server.manager.connect(view.id, None)
        await server.check()

    @pytest.mark.parametrize("failure", [Failure.REFUSE, Failure.DIE])
    async def test_an_agent_that_does_not_answer_the_freeze(
        self, server: Server, world: World, failure: Failure
    ) -> None:
        view = await server.create()
        world.host.fail("POST /freeze", failure)
        with pytest.raises(GuestUnresponsive):
            await server.manager.pause(view.id, require_healthy_guest=True)
        await server.check()
        for work in (server.manager.snapshot(view.id, None), server.manager.fork(view.id, 1, None)):
            world.host.fail("POST /freeze", failure)
            await work
            await server.check()

    @pytest.mark.parametrize("failure", Failure)
    @pytest.mark.parametrize("call", ["POST /init", "POST /unfreeze"])
    async def test_an_agent_that_fails_at_the_start(
        self, server: Server, world: World, call: str, failure: Failure
    ) -> None:
        if (call, failure) == ("POST /unfreeze", Failure.HANG):
            pytest.skip("its deadline is the client's")
        world.host.fail(call, failure)
        with pytest.raises((GuestUnresponsive, OperationFailed)):
            await server.create()
        await server.check()
        view = await server.create()
        await server.manager.pause(view.id)
        world.host.fail(call, failure)
        with pytest.raises((GuestUnresponsive, OperationFailed)):
            await server.manager.connect(view.id, None)
        await server.check()
        await server.manager.connect(view.id, None)

    async def test_an_agent_that_fails_to_thaw_does_not_cost_the_sandbox(self, server: Server, world: World) -> None:
        view = await server.create()
        world.host.fail("POST /init", Failure.REFUSE)
        await server.manager.snapshot(view.id, None)
        assert server.state(view) is PublicState.RUNNING
        await server.check()


class TestVms:
    async def test_one_that_ends_by_itself_is_gone(self, server: Server, world: World) -> None:
        view = await server.create()
        await world.ask(view, server, "power-off")
        await until(lambda: not server.manager._sandboxes)
        with pytest.raises(NotFound, match="ended"):
            server.manager.get(view.id)
        with pytest.raises(NotFound, match="ended"):
            await server.manager.pause(view.id)
        await server.check()

    @pytest.mark.parametrize("call", ["PATCH /vm", "PUT /snapshot/create"])
    @pytest.mark.parametrize("failure", [Failure.DIE, Failure.HANG])
    async def test_one_that_dies_under_a_capture(
        self, server: Server, world: World, call: str, failure: Failure
    ) -> None:
        for work in (server.manager.pause, lambda s: server.manager.snapshot(s, None), self.fork(server)):
            view = await server.create()
            world.host.fail(call, failure)
            with pytest.raises(SandboxLost):
                await work(view.id)
            with pytest.raises(NotFound):
                server.manager.get(view.id)
            await server.check()

    async def test_one_that_dies_as_it_starts_is_not_waited_for(self, server: Server, world: World) -> None:
        view = await server.create()
        await server.manager.pause(view.id)
        for begin in (server.create, lambda: server.manager.connect(view.id, None)):
            world.host.fail("POST /init", Failure.HANG)
            starting = asyncio.ensure_future(begin())
            await until(lambda: any(process.runs for process in world.host.processes.values()))
            world.host.kill(*world.host.processes)
            with pytest.raises(OperationFailed, match="has ended"):
                await starting
            assert server.state(view) is PublicState.PAUSED
            await server.check()

    @pytest.mark.parametrize("call", ["PATCH /vm", "PUT /snapshot/create"])
    async def test_one_that_refuses_a_capture_goes_on(self, server: Server, world: World, call: str) -> None:
        view = await server.create()
        await world.ask(view, server, "fill 3 0 9")
        expected = await world.ask(view, server, "hash")
        for work in (server.manager.pause, lambda s: server.manager.snapshot(s, None), self.fork(server)):
            world.host.fail(call, Failure.REFUSE)
            with pytest.raises(OperationFailed):
                await work(view.id)
            await server.check()
        await server.manager.pause(view.id)
        await server.manager.connect(view.id, None)
        assert await world.ask(view, server, "hash") == expected

    @pytest.mark.parametrize("failure", Failure)
    @pytest.mark.parametrize("call", ["spawn", "PUT /snapshot/load"])
    async def test_one_that_does_not_start(self, server: Server, world: World, call: str, failure: Failure) -> None:
        world.host.fail(call, failure)
        with pytest.raises(OperationFailed):
            await server.create()
        await server.check()
        view = await server.create()
        await server.manager.pause(view.id)
        world.host.fail(call, failure)
        with pytest.raises(OperationFailed):
            await server.manager.connect(view.id, None)
        assert server.state(view) is PublicState.PAUSED
        await server.check()
        if world.kind is CaptureKind.SUCCESSION:
            await server.manager.connect(view.id, None)
            world.host.fail(call, failure)
            with pytest.raises(OperationFailed):
                await server.manager.snapshot(view.id, None)
            await server.check()

    @staticmethod
    def fork(server: Server) -> Callable[[str], Coroutine[Any, Any, Any]]:
        return lambda sandbox: server.manager.fork(sandbox, 1, None)
