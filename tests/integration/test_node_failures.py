"""One thing fails at each call a sandbox's work makes: the answer says so, what is reported is true, nothing is held
that nobody uses, and the next try succeeds.
"""

import contextlib
import errno
from collections.abc import AsyncIterator

import pytest
from tests.integration.test_node_crashes import OPERATIONS, Scene, content
from tests.support.blockd import needs_fuse
from tests.support.node_harness import Server, World, open_world

from aenv.errors import AenvError, NotFound, OperationFailed, StorageFull
from aenv.vmm.contract import CaptureKind

pytestmark = needs_fuse


@pytest.fixture(params=list(CaptureKind))
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with open_world(request.param) as world:
        yield world


ERRORS = [OperationFailed("told to fail"), StorageFull("told to be full")]
DEFECTS = [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a defect")]
"""What database and storage client never raise."""
LEFT_TO_THE_SWEEP = {"vm.stop", "storage.close", "edge.withdraw", "edge.publish"}
"""What fails there is true after the next start only."""


@pytest.mark.parametrize("name", OPERATIONS)
async def test_any_call_may_fail(world: World, name: str) -> None:
    server = await world.server()
    scene = await Scene.of(server)
    server.gate.begin()
    await OPERATIONS[name](server, scene)
    await server.quiet()
    calls = list(server.gate.calls)
    await server.end()
    for number, call in enumerate(calls):
        errors = ERRORS if call.startswith(("database.", "storage.")) else [*ERRORS, *DEFECTS]
        for error in errors:
            scene = await Scene.of(server)
            server.gate.begin()
            server.gate.errors[number] = error
            try:
                server = await fails_cleanly(server, scene, name)
                await server.end()
            except BaseException as failure:
                failure.add_note(f"{error!r} at call {number} of {calls}")
                raise


async def fails_cleanly(server: Server, scene: Scene, name: str) -> Server:
    """The server that goes on: another one if something was left to its sweep."""
    world, manager, gate = server.world, server.manager, server.gate
    with contextlib.suppress(AenvError):
        await OPERATIONS[name](server, scene)
    await server.quiet()
    failed = gate.failed
    gate.errors.clear()
    assert server.tasks.failures == 0
    if failed in LEFT_TO_THE_SWEEP or (name in ("resume", "kill", "kill paused") and failed == "database.write"):
        await server.stop(keep_running=True)
        server = await world.server()
        manager = server.manager
    await server.check()
    gone = {"kill": scene.running.id, "kill paused": scene.paused.id}.get(name)
    for sandbox, expected in scene.contents.items():
        if sandbox == gone:
            with pytest.raises(NotFound):
                manager.get(sandbox)
            continue
        view, _ = await manager.connect(sandbox, None)
        assert await content(world, view, server) == expected
    for snapshot in manager.list_snapshots(name="named"):
        child = await server.create(snapshot.id)
        assert await content(world, child, server) == scene.contents[scene.running.id]
        await manager.delete_snapshot("named")
    if name == "pause":
        await manager.pause(scene.running.id)
        view, _ = await manager.connect(scene.running.id, None)
        assert await content(world, view, server) == scene.contents[view.id]
    elif name in ("create", "snapshot", "fork", "timeout"):
        await OPERATIONS[name](server, scene)
    await server.check()
    return server
