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
