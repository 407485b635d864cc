"""A server dies between any two things it does to the world; the next one finds a true state, loses nothing that was
promised and leaves nothing behind.

Each case is one operation. It is run once to count its calls on the world (database, blockd, VMs, network, edge), then
again and again with the server dying at each call, before it takes effect and after.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from tests.support.blockd import needs_fuse, until
from tests.support.node_harness import Gate, Server, World, open_world

from aenv.errors import AenvError, CorruptData, NotFound
from aenv.node.views import PublicState, SandboxView
from aenv.vmm.contract import CaptureKind

pytestmark = needs_fuse


@pytest.fixture(params=list(CaptureKind))
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with open_world(request.param) as world:
        yield world


@dataclass
class Scene:
    """What is there before: a running sandbox that was snapshotted once, and a paused one."""

    running: SandboxView
    paused: SandboxView
    contents: dict[str, tuple[str, str]]

    @classmethod
    async def of(cls, server: Server) -> "Scene":
        world = server.world
        views, contents = [], {}
        for number in (1, 2):
            view = await server.create()
            await world.ask(view, server, f"fill {number} 0 20")
            await world.ask(view, server, f"write 0 {number}")
            views.append(view)
            contents[view.id] = await content(world, view, server)
        await server.manager.snapshot(views[0].id, None)
        await server.manager.pause(views[1].id)
        await server.check()
        return cls(*views, contents)


async def content(world: World, view: SandboxView, server: Server) -> tuple[str, str]:
    return await world.ask(view, server, "hash"), await world.ask(view, server, "read 0")


Operation = Callable[[Server, Scene], Awaitable[object]]

OPERATIONS: dict[str, Operation] = {
    "create": lambda server, scene: server.create(),
    "pause": lambda server, scene: server.manager.pause(scene.running.id),
    "resume": lambda server, scene: server.manager.connect(scene.paused.id, None),
    "snapshot": lambda server, scene: server.manager.snapshot(scene.running.id, "named"),
    "fork": lambda server, scene: server.manager.fork(scene.running.id, 2, None),
    "kill": lambda server, scene: server.manager.kill(scene.running.id),
    "kill paused": lambda server, scene: server.manager.kill(scene.paused.id),
    "timeout": lambda server, scene: server.manager.set_timeout(scene.running.id, 1000),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_server_may_die_at_any_call(world: World, name: str) -> None:
    operation = OPERATIONS[name]
    gate = Gate()
    server = await world.server(gate)
    scene = await Scene.of(server)
    gate.begin()
    await operation(server, scene)
    await server.quiet()
    calls = list(gate.calls)
    await server.end()
    assert len(calls) >= 1
    for number in range(len(calls)):
        for after in (False, True):
            scene = await Scene.of(server)
            gate.begin()
            gate.die_after, gate.die_at = after, number
            done, answer = await until_death(server, operation(server, scene))
            if not gate.dead:  # calls of background work come in another order
                gate.die_at = None
                await server.end()
                continue
            dead, gate = server, Gate()
            server = await world.server(gate)
            try:
                await server.check()
                await what_was_promised_is_so(server, scene, name, done=done, answer=answer)
                await server.end()
            except BaseException as error:
                error.add_note(f"died {'after' if after else 'before'} call {number} of {calls}")
                raise
            await dead.bury()


@pytest.mark.parametrize("name", ["create", "pause", "resume", "snapshot", "fork", "kill"])
async def test_a_server_may_die_while_it_recovers(world: World, name: str) -> None:
    gate = Gate()
    server = await world.server(gate)
    await server.end()
    scene = await Scene.of(server)
    gate.begin()
    gate.die_at, gate.die_after = {"create": 5, "kill": 2}.get(name, 4), True
    done, answer = await until_death(server, OPERATIONS[name](server, scene))
    assert gate.dead
    for number in range(200):
        gate = Gate()
        gate.die_at, gate.die_after = number // 2, bool(number % 2)
        server = await world.open(gate)
        await until_death(server, server.begin())
        if not gate.dead:
            break
    assert not gate.dead
    gate.die_at = None
    await server.check()
    await what_was_promised_is_so(server, scene, name, done=done, answer=answer)
    await server.end()


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_server_may_be_cut_short_at_any_call(world: World, name: str) -> None:
    """Its tasks are cancelled, so unlike one that dies it cleans up on the way out. Nobody is left waiting."""
    server = await world.server()
    scene = await Scene.of(server)
    server.gate.begin()
    await OPERATIONS[name](server, scene)
    await server.quiet()
    count = len(server.gate.calls)
    await server.end()
    for number in range(count):
        scene = await Scene.of(server)
        server.gate.begin()
        server.gate.reached.clear()
        server.gate.hold_at = number
        asking = asyncio.ensure_future(OPERATIONS[name](server, scene))
        await server.gate.reached.wait()
        await server.tasks.close()
        (answer,) = await asyncio.wait_for(asyncio.gather(asking, return_exceptions=True), 10)
        done = not isinstance(answer, BaseException) and (name != "fork" or all(hasattr(c, "id") for c in answer))
        await server._database.close()
        server = await world.server()
        try:
            await server.check()
            await what_was_promised_is_so(server, scene, name, done=done, answer=answer)
            await server.end()
        except BaseException as error:
            error.add_note(f"cut short at call {number}")
            raise


async def test_only_what_is_on_stable_storage_survives_the_host(world: World) -> None:
    gate = Gate()
    server = await world.server(gate)
    scene = await Scene.of(server)
    unsynced = await server.create()
    snapshot = await server.manager.snapshot(unsynced.id, None)
    await server.quiet()
    gate.hold["storage.sync_layers"] = asyncio.Event()
    await server.manager.pause(unsynced.id)
    await gate.reached.wait()
    gate.dead = True
    await world.reboot()
    server = await world.server()
    states = {view.id: view.state for view in server.manager.sandboxes()}
    assert states == {scene.paused.id: PublicState.PAUSED, unsynced.id: PublicState.PAUSED}
    with pytest.raises(NotFound, match="lost"):
        server.manager.get(scene.running.id)
    view, _ = await server.manager.connect(scene.paused.id, None)
    assert await content(world, view, server) == scene.contents[view.id]
    with pytest.raises(CorruptData, match="stable storage"):
        await server.manager.connect(unsynced.id, None)
    await server.manager.kill(unsynced.id)
    await server.create(snapshot.id)
    await server.end()


async def test_what_was_not_synced_is_after_a_crash_of_the_server(world: World) -> None:
    gate = Gate()
    server = await world.server(gate)
    scene = await Scene.of(server)
    await server.quiet()
    gate.hold["storage.sync_layers"] = asyncio.Event()
    await server.manager.pause(scene.running.id)
    await gate.reached.wait()
    gate.dead = True
    server = await world.server()
    await server.check()
    await server.stop()
    await world.reboot()
    server = await world.server()
    view, _ = await server.manager.connect(scene.running.id, None)
    assert await content(world, view, server) == scene.contents[view.id]
    await server.end()


async def test_a_stop_pauses_and_the_next_start_finds_it_so(world: World) -> None:
    server = await world.server()
    scene = await Scene.of(server)
    starting = asyncio.ensure_future(server.create())
    await asyncio.sleep(0)
    await server.stop()
    with contextlib.suppress(AenvError):
        await starting
    assert world.host.processes == {}
    await world.reboot()
    server = await world.server()
    await server.check()
    for sandbox, expected in scene.contents.items():
        view, resumed = await server.manager.connect(sandbox, None)
        assert resumed
        assert await content(world, view, server) == expected
    await server.end()


async def test_a_stop_that_keeps_running_lets_sandboxes_be(world: World) -> None:
    gate = Gate()
    server = await world.server(gate)
    scene = await Scene.of(server)
    gate.hold["storage.snapshot"] = hold = asyncio.Event()
    snapshotting = asyncio.ensure_future(server.manager.snapshot(scene.running.id, "named"))
    await gate.reached.wait()
    stopping = asyncio.ensure_future(server.stop(keep_running=True))
    await asyncio.sleep(0.01)
    with pytest.raises(AenvError, match="shutting down"):
        await server.create()
    with pytest.raises(AenvError, match="shutting down"):
        await server.manager.connect(scene.paused.id, None)
    assert not stopping.done()
    hold.set()
    await snapshotting
    await stopping
    ticks = int(await world.ask(scene.running, server, "count"))
    server = await world.server()
    await server.check()
    assert server.state(scene.running) is PublicState.RUNNING
    assert int(await world.ask(scene.running, server, "count")) >= ticks
    assert await content(world, scene.running, server) == scene.contents[scene.running.id]
    await server.end()


async def until_death(server: Server, work: Awaitable[object]) -> tuple[bool, object]:
    """Whether the caller was answered before the server died, and with what."""
    task = asyncio.ensure_future(work)
    died = asyncio.ensure_future(server.gate.reached.wait())
    await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
    if not died.done():
        settled = asyncio.ensure_future(server.quiet())
        await asyncio.wait({settled, died}, return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
    died.cancel()
    await until(lambda: not server.gate.in_flight)
    done = task.done()
    if not done:
        server.abandon(task)
    return done, task.result() if done else None


async def what_was_promised_is_so(server: Server, scene: Scene, name: str, *, done: bool, answer: object) -> None:
    world, manager = server.world, server.manager
    states = {view.id: view.state for view in manager.sandboxes()}
    snapshots = manager.list_snapshots(name="named")
    match name:
        case "create" if done:
            assert states[answer.id] is PublicState.RUNNING
        case "pause" if done:
            assert states[scene.running.id] is PublicState.PAUSED
        case "resume" if done:
            assert states[scene.paused.id] is PublicState.RUNNING
        case "snapshot" if done:
            assert [snapshot.id for snapshot in snapshots] == [answer.id]
        case "fork" if done:
            assert {child.id for child in answer} <= states.keys()
        case "kill" if done:
            assert scene.running.id not in states
        case "kill paused" if done:
            assert scene.paused.id not in states
        case "timeout" if done:
            expected = (manager.get(scene.running.id).end_at - world.clock.now()).total_seconds()
            assert expected == 1000
    gone = {"kill": scene.running.id, "kill paused": scene.paused.id}.get(name)
    assert ({scene.running.id, scene.paused.id} - {gone}) <= states.keys(), "a sandbox is lost"
    if name not in ("pause", "kill"):
        assert states[scene.running.id] is PublicState.RUNNING
    for sandbox, expected in scene.contents.items():
        if sandbox in states:
            view, _ = await manager.connect(sandbox, None)
            assert await content(world, view, server) == expected
            await manager.pause(sandbox)
            view, _ = await manager.connect(sandbox, None)
            assert await content(world, view, server) == expected
    for snapshot in snapshots:
        child = await server.create(snapshot.id)
        assert await content(world, child, server) == scene.contents[scene.running.id]
    await server.check()
