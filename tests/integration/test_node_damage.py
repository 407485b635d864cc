"""What is found damaged, unreadable, missing or foreign, and full disks: clear errors, and nothing lost besides."""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.integration.test_node_crashes import Scene, content
from tests.support.blockd import needs_fuse
from tests.support.node_harness import Server, World, open_world

from aenv.errors import Conflict, CorruptData, IncompatibleSnapshot, NotFound, StorageFull
from aenv.node.views import PublicState
from aenv.vmm.contract import CaptureKind

pytestmark = needs_fuse


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(CaptureKind.SUCCESSION) as world:
        yield world


@pytest.fixture
async def server(world: World) -> Server:
    return await world.server()


async def change(server: Server, statement: str, *parameters: object) -> None:
    await server._database.write(lambda connection: connection.execute(statement, parameters))


async def again(world: World, server: Server) -> Server:
    await server.stop(keep_running=True)
    return await world.server()


BAD_RECORDS = ["", "{", "[]", "null", '"text"', "{}", '{"id": 5}', '{"lifecycle": null}']


@pytest.mark.parametrize("text", BAD_RECORDS)
async def test_a_sandbox_record_that_cannot_be_read_is_left_as_it_is(world: World, server: Server, text: str) -> None:
    scene = await Scene.of(server)
    await change(server, "UPDATE sandboxes SET record = ? WHERE id = ?", text, scene.paused.id)
    server = await again(world, server)
    assert [view.id for view in server.manager.sandboxes()] == [scene.running.id]
    (row,) = await server._database.read("SELECT record FROM sandboxes WHERE id = ?", (scene.paused.id,))
    assert row["record"] == text
    assert [record.source_sandbox for record in server.snapshots.all("pause")] == [scene.paused.id], "its capture stays"
    assert await content(world, scene.running, server) == scene.contents[scene.running.id]


@pytest.mark.parametrize("text", BAD_RECORDS)
async def test_a_snapshot_record_that_cannot_be_read_keeps_its_sandbox(world: World, server: Server, text: str) -> None:
    scene = await Scene.of(server)
    capture = server.manager._sandboxes[scene.paused.id].record.paused_as
    (row,) = await server._database.read("SELECT record FROM snapshots WHERE id = ?", (capture,))
    await change(server, "UPDATE snapshots SET record = ? WHERE id = ?", text, capture)
    server = await again(world, server)
    assert len(server.problems) == 1
    assert server.state(scene.paused) is PublicState.PAUSED
    with pytest.raises(CorruptData) as caught:
        await server.manager.connect(scene.paused.id, None)
    assert caught.value.hint
    assert server.state(scene.paused) is PublicState.PAUSED
    # a program that can read it again finds everything
    await change(server, "UPDATE snapshots SET record = ? WHERE id = ?", row["record"], capture)
    server = await again(world, server)
    view, _ = await server.manager.connect(scene.paused.id, None)
    assert await content(world, view, server) == scene.contents[view.id]
    await server.end()


async def test_a_killed_sandbox_takes_its_unreadable_capture_along(world: World, server: Server) -> None:
    scene = await Scene.of(server)
    await change(server, "UPDATE snapshots SET record = '' WHERE id LIKE 's%' AND record LIKE '%\"pause\"%'")
    server = await again(world, server)
    await server.manager.kill(scene.paused.id)
    server = await again(world, server)
    assert server.problems == []
    await server.end()


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "changed"])
async def test_a_damaged_state_file(world: World, server: Server, damage: str) -> None:
    scene = await Scene.of(server)
    capture = server.manager._sandboxes[scene.paused.id].record.paused_as
    path = world.paths.states / capture
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": good[:-1], "changed": b"x" + good[1:]}[damage])
    for _ in range(2):
        with pytest.raises(CorruptData) as caught:
            await server.manager.connect(scene.paused.id, None)
        assert caught.value.hint
        assert server.state(scene.paused) is PublicState.PAUSED
        server = await again(world, server)
    path.write_bytes(good)
    view, _ = await server.manager.connect(scene.paused.id, None)
    assert await content(world, view, server) == scene.contents[view.id]
    await server.end()


@pytest.mark.parametrize("which", ["disk_layers", "memory_layers"])
async def test_a_missing_layer(world: World, server: Server, which: str) -> None:
    scene = await Scene.of(server)
    record = server.snapshots.get(server.manager._sandboxes[scene.paused.id].record.paused_as)
    path = world.paths.layers / f"{getattr(record, which)[-1]}.lsmt"
    aside = world.directory / "aside"
    os.rename(path, aside)
    with pytest.raises(CorruptData, match="layer") as caught:
        await server.manager.connect(scene.paused.id, None)
    assert caught.value.hint
    assert server.state(scene.paused) is PublicState.PAUSED
    os.rename(aside, path)
    await server.check()
    view, _ = await server.manager.connect(scene.paused.id, None)
    assert await content(world, view, server) == scene.contents[view.id]
    await server.end()


@pytest.mark.parametrize("content_of_layer", [b"", b"not a layer", bytes(1 << 16)])
async def test_a_damaged_layer_of_a_snapshot(world: World, server: Server, content_of_layer: bytes) -> None:
    scene = await Scene.of(server)
    (snapshot,) = server.manager.list_snapshots()
    record = server.snapshots.get(snapshot.id)
    await server.manager.kill(scene.running.id)  # whose open image would go on with what it has
    (world.paths.layers / f"{record.memory_layers[-1]}.lsmt").write_bytes(content_of_layer)
    with pytest.raises(CorruptData):
        await server.create(snapshot.id)
    await server.end()


async def test_a_damaged_template_is_built_again(world: World, server: Server) -> None:
    before = server.base
    assert before is not None
    (world.paths.states / before.id).unlink()
    server = await again(world, server)
    assert server.base is not None
    assert server.base.id != before.id
    await server.create()
    await server.end()


async def test_a_snapshot_of_another_host(world: World, server: Server) -> None:
    scene = await Scene.of(server)
    (snapshot,) = server.manager.list_snapshots()
    for row in await server._database.read("SELECT id, record FROM snapshots"):
        record = json.loads(row["record"])
        record["manifest"]["cpu_model"] = "another"
        await change(server, "UPDATE snapshots SET record = ? WHERE id = ?", json.dumps(record), row["id"])
    server = await again(world, server)
    with pytest.raises(IncompatibleSnapshot, match="cpu_model"):
        await server.manager.connect(scene.paused.id, None)
    assert server.state(scene.paused) is PublicState.PAUSED
    with pytest.raises(IncompatibleSnapshot):
        await server.create(snapshot.id)
    await server.create()  # of a template built anew
    await server.end()


async def test_a_newer_database_is_refused(world: World, server: Server) -> None:
    await server.stop()
    other = await world.open()
    await change(other, "UPDATE versions SET version = 99 WHERE component = 'sandboxes'")
    await other._database.close()
    with pytest.raises(CorruptData, match="newer") as caught:
        await world.open()
    assert caught.value.hint


@pytest.mark.parametrize("machine", [{}, {"slot": "x"}, {"shape": {}}, {"shape": {"vcpus": 1}}, {"vm": None}])
async def test_a_machine_that_is_written_down_wrong_is_lost_alone(
    world: World, server: Server, machine: dict[str, object]
) -> None:
    scene, other = await Scene.of(server), await server.create()
    (row,) = await server._database.read("SELECT record FROM sandboxes WHERE id = ?", (scene.running.id,))
    record = json.loads(row["record"])
    record["machine"] = {**record["machine"], **machine} if machine else {}
    await change(server, "UPDATE sandboxes SET record = ? WHERE id = ?", json.dumps(record), scene.running.id)
    server = await again(world, server)
    with pytest.raises(NotFound, match="lost"):
        server.manager.get(scene.running.id)
    assert server.state(other) is PublicState.RUNNING
    await server.check()
    await server.end()


@contextlib.contextmanager
def small_home(size_mib: int) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="aenv-h-", dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=711", "aenv-test", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)
        directory.rmdir()


def fill(home: Path, leave: int = 0) -> Path:
    """A file that takes all space but `leave` bytes."""
    path = home / "filler"
    stat = os.statvfs(home)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - leave)
    return path


class TestAFullDisk:
    @pytest.fixture(params=list(CaptureKind))
    async def world(self, request: pytest.FixtureRequest) -> AsyncIterator[World]:
        with small_home(64) as home:
            async with open_world(request.param, home=home) as world:
                yield world

    @pytest.mark.parametrize("leave", [0, 4096, 16384, 65536, 262144])
    async def test_nothing_is_lost_and_space_returns(self, world: World, server: Server, leave: int) -> None:
        scene = await Scene.of(server)
        await server.quiet()
        manager, before = server.manager, {view.id: view.state for view in server.manager.sandboxes()}
        filler = fill(world.paths.home, leave)
        for work in (
            lambda: server.create(),
            lambda: manager.pause(scene.running.id),
            lambda: manager.snapshot(scene.running.id, "named"),
            lambda: manager.fork(scene.running.id, 1, None),
            lambda: manager.connect(scene.paused.id, None),
        ):
            refused = Conflict if server.state(scene.running) is PublicState.PAUSED else StorageFull
            with contextlib.suppress(StorageFull, refused):
                await work()
            await server.check()
        states = {view.id: view.state for view in manager.sandboxes()}
        assert before.keys() <= states.keys()
        filler.unlink()
        for sandbox, expected in scene.contents.items():
            view, _ = await manager.connect(sandbox, None)
            assert await content(world, view, server) == expected
        await server.end()

    async def test_what_is_deleted_on_a_full_disk_makes_room(self, world: World, server: Server) -> None:
        scene = await Scene.of(server)
        for number in range(4):
            await server.manager.snapshot(scene.running.id, f"number-{number}")
        await server.quiet()
        fill(world.paths.home)
        await server.manager.kill(scene.paused.id)
        for number in range(4):
            await server.manager.delete_snapshot(f"number-{number}")
        await server.manager.kill(scene.running.id)
        await server.check()
        assert os.statvfs(world.paths.home).f_bavail > 0

    async def test_a_server_starts_on_a_full_disk(self, world: World, server: Server) -> None:
        scene = await Scene.of(server)
        await server.quiet()
        await server.stop(keep_running=True)
        filler = fill(world.paths.home)
        server = await world.server()
        await server.check()
        await server.manager.kill(scene.paused.id)
        filler.unlink()
        await server.end()

    async def test_below_the_reserve_nothing_begins(self, world: World, server: Server) -> None:
        scene = await Scene.of(server)
        server.capacity._min_free_mib = 1 << 20
        for work in (
            server.create(),
            server.manager.pause(scene.running.id),
            server.manager.snapshot(scene.running.id, None),
            server.manager.connect(scene.paused.id, None),
        ):
            with pytest.raises(StorageFull) as caught:
                await work
            assert caught.value.hint
            await server.check()
        server.capacity._min_free_mib = 0
        await server.end()
