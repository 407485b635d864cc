"""Times to live: what happens at a deadline, and what a request that comes at the same moment does to it."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from tests.support.blockd import needs_fuse, until
from tests.support.node_harness import Gate, Server, World, open_world

from aenv.errors import NotFound, StorageFull
from aenv.node.actions import RETRY_INTERVAL_S
from aenv.node.views import OnTimeout, PublicState
from aenv.testing.clock import settle
from aenv.vmm.contract import CaptureKind

pytestmark = needs_fuse


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(CaptureKind.SUCCESSION) as world:
        yield world


@pytest.fixture
async def server(world: World) -> AsyncIterator[Server]:
    server = await world.server()
    yield server
    await world.servers[-1].end()


async def test_at_the_deadline_it_is_paused(server: Server, world: World) -> None:
    view = await server.create(timeout_s=60)
    await world.clock.advance(59)
    await server.check()
    assert server.state(view) is PublicState.RUNNING
    await world.clock.advance(1)
    await server.check()
    assert server.state(view) is PublicState.PAUSED
    await world.clock.advance(10_000)
    view, resumed = await server.manager.connect(view.id, 30)
    assert resumed
    await world.clock.advance(30)
    await server.check()
    assert server.state(view) is PublicState.PAUSED


async def test_at_the_deadline_it_is_killed(server: Server, world: World) -> None:
    view = await server.create(timeout_s=60, on_timeout=OnTimeout.KILL)
    await world.clock.advance(60)
    await server.check()
    with pytest.raises(NotFound):
        server.manager.get(view.id)


async def test_a_connect_extends_and_never_shortens(server: Server, world: World) -> None:
    view = await server.create(timeout_s=60)
    for asked, expected in ((10, 60), (None, 60), (100, 100), (70, 100)):
        view, _ = await server.manager.connect(view.id, asked)
        assert view.end_at == world.clock.now() + timedelta(seconds=expected)
    await server.manager.set_timeout(view.id, 5)
    await world.clock.advance(5)
    await server.check()
    assert server.state(view) is PublicState.PAUSED


async def test_no_time_left_means_now(server: Server, world: World) -> None:
    view = await server.create()
    await server.manager.set_timeout(view.id, 0)
    await until(lambda: server.state(view) is PublicState.PAUSED)
    await server.check()


async def test_a_resume_without_a_timeout_gets_the_one_before(server: Server, world: World) -> None:
    view = await server.create(timeout_s=77)
    await server.manager.pause(view.id)
    view, _ = await server.manager.connect(view.id, None)
    assert view.end_at == world.clock.now() + timedelta(seconds=77)


async def test_a_request_before_the_expiry_is_seen_wins(server: Server, world: World) -> None:
    """The deadline passes while a snapshot is made; behind it in the queue waits a longer deadline."""
    view = await server.create(timeout_s=60)
    server.gate.hold["storage.snapshot"] = event = asyncio.Event()
    snapshotting = asyncio.ensure_future(server.manager.snapshot(view.id, None))
    await server.gate.reached.wait()
    extending = asyncio.ensure_future(server.manager.set_timeout(view.id, 600))
    await settle()
    server.manager.expired(view.id)
    await world.clock.advance(61)
    event.set()
    await asyncio.gather(snapshotting, extending)
    await server.check()
    assert server.state(view) is PublicState.RUNNING
    assert server.manager.get(view.id).end_at == world.clock.now() + timedelta(seconds=600)


async def test_an_expiry_during_a_snapshot_comes_after_it(server: Server, world: World) -> None:
    view = await server.create(timeout_s=60)
    server.gate.hold["storage.snapshot"] = event = asyncio.Event()
    snapshotting = asyncio.ensure_future(server.manager.snapshot(view.id, None))
    await server.gate.reached.wait()
    await world.clock.advance(61)
    event.set()
    await snapshotting
    await until(lambda: server.state(view) is PublicState.PAUSED)
    await server.check()


async def test_an_expiry_of_a_clock_that_was_set_back_comes_again(server: Server, world: World) -> None:
    view = await server.create(timeout_s=60)
    server.deadlines.clear(view.id)
    server.manager.expired(view.id)
    await server.check()
    assert server.state(view) is PublicState.RUNNING


async def test_a_pause_that_fails_is_tried_again_later(server: Server, world: World) -> None:
    view = await server.create(timeout_s=60)
    server.gate.fail["storage.snapshot"] = StorageFull("told to be full")
    await world.clock.advance(60)
    await server.check()
    assert server.state(view) is PublicState.RUNNING
    assert server.manager.get(view.id).end_at == world.clock.now() + timedelta(seconds=RETRY_INTERVAL_S)
    calls = len(server.gate.calls)
    await world.clock.advance(RETRY_INTERVAL_S - 1)
    await server.quiet()
    assert len(server.gate.calls) == calls
    await world.clock.advance(1)
    await server.check()
    assert server.state(view) is PublicState.PAUSED


async def test_a_deadline_that_cannot_be_written_down_does_not_hold(server: Server, world: World) -> None:
    view = await server.create(timeout_s=60)
    for request in (server.manager.set_timeout(view.id, 600), server.manager.connect(view.id, 600)):
        server.gate.fail["database.write"] = StorageFull("told to be full")
        with pytest.raises(StorageFull):
            await request
        assert server.manager.get(view.id) == view
        await server.check()


@pytest.mark.parametrize("on_timeout", OnTimeout)
async def test_a_deadline_that_passed_while_no_server_ran(world: World, server: Server, on_timeout: OnTimeout) -> None:
    gate = Gate()
    await server.stop()
    server = await world.server(gate)
    expired = await server.create(timeout_s=60, on_timeout=on_timeout)
    running = await server.create(timeout_s=600)
    gate.dead = True
    await world.clock.advance(100)
    server = await world.server()
    await until(lambda: expired.id not in server.deadlines._due)
    await server.check()
    states = {view.id: view.state for view in server.manager.sandboxes()}
    assert states.pop(running.id) is PublicState.RUNNING
    assert states == ({expired.id: PublicState.PAUSED} if on_timeout is OnTimeout.PAUSE else {})
