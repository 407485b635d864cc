"""Machines kept ready: taken, replaced, and of no harm when they are of no use."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.blockd import needs_fuse, until
from tests.support.node_harness import Gate, Server, World, open_world

from aenv.errors import AenvError, OperationFailed
from aenv.network.policy import NetworkPolicy
from aenv.node.views import PublicState
from aenv.testing.fake_vmm import Failure
from aenv.vmm.contract import CaptureKind

pytestmark = needs_fuse
SIZE = 2


@pytest.fixture(params=list(CaptureKind))
async def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr("aenv.node.warm_pool._REFILL_DELAY_S", 0.0)
    monkeypatch.setattr("aenv.node.warm_pool._RETRY_S", 0.01)
    async with open_world(request.param, warm_pool_size=SIZE) as world:
        yield world


async def filled(server: Server) -> None:
    await until(lambda: server.warm_pool.ready == SIZE)
    await server.check()


@pytest.fixture
async def server(world: World) -> AsyncIterator[Server]:
    server = await world.server()
    await filled(server)
    yield server
    await filled(world.servers[-1])
    await world.servers[-1].end()


async def test_a_create_takes_one_and_another_is_made(server: Server, world: World) -> None:
    ready = {machine.id for machine in server.warm_pool._ready}
    for _ in range(3):
        server.gate.begin()
        view = await server.create(policy=NetworkPolicy(internet=False))
        machine = server.manager._sandboxes[view.id].machine
        assert machine is not None
        assert machine.id in ready
        assert world.network.policies[machine.slot.index] == NetworkPolicy(internet=False)
        await filled(server)
        ready = {machine.id for machine in server.warm_pool._ready}
    await server.manager.pause(view.id)
    await server.manager.connect(view.id, None)
    await filled(server)


async def test_the_pool_is_for_its_template_only(server: Server) -> None:
    view = await server.create()
    snapshot = await server.manager.snapshot(view.id, None)
    await filled(server)
    ready = [machine.id for machine in server.warm_pool._ready]
    await server.create(snapshot.id)
    assert [machine.id for machine in server.warm_pool._ready] == ready


async def test_one_that_died_is_not_missed(server: Server, world: World) -> None:
    for machine in server.warm_pool._ready:
        world.host.kill(machine.vm.record.pid)
    for _ in range(SIZE + 1):
        view = await server.create()
        assert server.state(view) is PublicState.RUNNING


@pytest.mark.parametrize("call", ["slots.set_policy", "vm.resume"])
async def test_one_that_cannot_be_used_is_not_missed(server: Server, call: str) -> None:
    server.gate.fail[call] = OperationFailed("told to fail")
    await server.create()
    await filled(server)


async def test_one_whose_agent_fails_is_freed(server: Server, world: World) -> None:
    world.host.fail("POST /init", Failure.REFUSE)
    with pytest.raises(AenvError):
        await server.create()
    await filled(server)


@pytest.mark.parametrize("call", ["slots.acquire", "storage.open_disk", "driver.restore", "vm.suspend"])
@pytest.mark.parametrize("error", [OperationFailed("told to fail"), OSError(28, "No space left on device")])
async def test_one_that_cannot_be_made_is_tried_again(server: Server, call: str, error: Exception) -> None:
    server.gate.fail[call] = error
    await server.create()
    await filled(server)
    assert not server.gate.fail


async def test_a_stop_frees_it(world: World) -> None:
    for keep_running in (False, True):
        server = await world.server()
        await filled(server)
        await server.stop(keep_running=keep_running)
        assert world.host.processes == {}
        assert await world.storage.images() == []


async def test_a_stop_while_one_is_made(world: World) -> None:
    gate = Gate()
    gate.hold["driver.restore"] = asyncio.Event()
    server = await world.server(gate)
    await gate.reached.wait()
    await server.stop()
    assert world.host.processes == {}
    assert await world.storage.images() == []


async def test_a_crash_leaves_none_of_it(server: Server) -> None:
    view = await server.create()
    server.gate.dead = True
    server = await server.world.server()
    await filled(server)
    assert server.state(view) is PublicState.RUNNING
