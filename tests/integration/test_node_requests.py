"""Requests on sandboxes: what each does, what it is refused for, and what happens when several come at once."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from tests.support.blockd import needs_fuse
from tests.support.node_harness import Server, World, open_world

from aenv.errors import Conflict, InvalidRequest, NotFound
from aenv.node.views import PublicState, SandboxView
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
