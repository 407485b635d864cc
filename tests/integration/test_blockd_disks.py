"""Disks as a VMM sees them: a file of blockd's mount, written, discarded, sealed, reopened."""

import asyncio
import errno
import json
import os
import random
import stat
from pathlib import Path

import pytest
from tests.support.blockd import UID, Blockd, ExportedFile, needs_fuse, read_disk, running_blockd
from tests.support.lsmt import Layer, compose, pattern

from aenv.errors import Conflict, CorruptData, NotFound, OperationFailed

pytestmark = needs_fuse
MIB = 1 << 20
GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
async def blockd():
    async with running_blockd() as blockd:
        yield blockd


async def open_empty(blockd: Blockd, size: int = 8 * MIB, image_id: str = "disk"):
    return await blockd.client.open_disk(image_id, layers=[], upper=blockd.new_upper(), uid=0, size=size)


def scribble(path: Path, model: bytearray, seed: int, rounds: int) -> None:
    """Random writes, discards and flushes through the mount and on the model."""
    source = random.Random(seed)
    with ExportedFile(path) as disk:
        for _ in range(rounds):
            length = source.randrange(1, 200) * 512
            offset = source.randrange((len(model) - length) // 512 + 1) * 512
            match source.randrange(10):
                case 0:
                    disk.punch(offset, length)
                    model[offset : offset + length] = bytes(length)
                case 1:
                    disk.zero_range(offset, length)
                    model[offset : offset + length] = bytes(length)
                case 2:
                    disk.sync()
                case _:
                    data = source.randbytes(length)
                    disk.write(offset, data)
                    model[offset : offset + length] = data


async def test_content_survives_sealing_closing_and_reopening(blockd):
    image = await open_empty(blockd)
    model = bytearray(image.size)
    layers = []
    for round_number in range(4):
        await asyncio.to_thread(scribble, image.path, model, round_number, 150)
        assert await asyncio.to_thread(read_disk, image.path, image.size) == model
        if round_number == 1:
            layer = blockd.layer("first")
            sealed = await blockd.client.snapshot("disk", layer)
            assert sealed.size_bytes == layer.stat().st_size
            assert sealed.live_bytes == Layer.read(layer).stored_bytes
            assert compose([layer], image.size) == model, "an independent reader agrees"
            layers = [layer]
        if round_number == 2:
            upper = blockd.directory / "upper1"
            await blockd.client.close("disk")
            image = await blockd.client.open_disk("disk", layers=layers, upper=upper, uid=0)
    assert await asyncio.to_thread(read_disk, image.path, image.size) == model


async def test_ten_snapshots_store_about_what_changed_and_each_is_exact(blockd):
    image = await open_empty(blockd)
    model = bytearray(image.size)
    layers, states = [], []
    for number in range(10):
        source = random.Random(number)
        with ExportedFile(image.path) as disk:
            for _ in range(20):
                offset, data = source.randrange(image.size // 4096) * 4096, source.randbytes(4096)
                await asyncio.to_thread(disk.write, offset, data)
                model[offset : offset + 4096] = data
        sealed = await blockd.client.snapshot("disk", blockd.layer(str(number)))
        assert sealed.live_bytes <= 20 * 4096
        assert sealed.size_bytes <= 20 * 4096 + 3 * 4096
        layers.append(sealed.path)
        states.append(bytes(model))
    for count, state in enumerate(states, start=1):
        assert compose(layers[:count], image.size) == state
        restored = await blockd.client.open_disk("restored", layers=layers[:count], upper=None, uid=0)
        assert await asyncio.to_thread(read_disk, restored.path, image.size) == state
        await blockd.client.close("restored")


async def test_two_disks_on_one_stack_do_not_see_each_other(blockd):
    base = await open_empty(blockd, image_id="base")
    model = bytearray(base.size)
    await asyncio.to_thread(scribble, base.path, model, 1, 50)
    layer = (await blockd.client.snapshot("base", blockd.layer("base"))).path
    models = [bytearray(model), bytearray(model)]
    images = [
        await blockd.client.open_disk(f"child{n}", layers=[layer], upper=blockd.new_upper(), uid=0) for n in (0, 1)
    ]
    await asyncio.gather(
        *(asyncio.to_thread(scribble, image.path, models[n], 10 + n, 100) for n, image in enumerate(images))
    )
    for image, expected in zip(images, models, strict=True):
        assert await asyncio.to_thread(read_disk, image.path, image.size) == expected
    assert await asyncio.to_thread(read_disk, base.path, base.size) == model


async def test_golden_operations_make_the_golden_image_in_a_layer_others_can_read(blockd):
    operations = json.loads((GOLDEN / "ops.json").read_text())
    image = await open_empty(blockd, size=16 * MIB)

    def perform(name: str) -> None:
        with ExportedFile(image.path) as disk:
            for step in operations[name]["ops"]:
                if step["op"] == "discard":
                    disk.punch(step["off"], step["len"])
                    continue
                data = pattern(step["fill"], step["arg"], step["off"], step["len"])
                for start in range(0, len(data), MIB):
                    disk.write(step["off"] + start, data[start : start + MIB])

    await asyncio.to_thread(perform, "l1")
    first = (await blockd.client.snapshot("disk", blockd.layer("l1"))).path
    await asyncio.to_thread(perform, "l2")
    second = (await blockd.client.snapshot("disk", blockd.layer("l2"))).path
    expected = compose([GOLDEN / "l1.lsmt", GOLDEN / "l2.lsmt"], 16 * MIB)
    assert compose([first, second], 16 * MIB) == expected
    assert await asyncio.to_thread(read_disk, image.path, image.size) == expected
    assert Layer.read(second).header.parent == Layer.read(first).header.uuid


async def test_golden_layers_are_read_through_the_mount(blockd):
    layers = []
    for name in ("l1.lsmt", "l2.lsmt"):
        layer = blockd.layer(name)
        layer.write_bytes((GOLDEN / name).read_bytes())
        layers.append(layer)
    image = await blockd.client.open_disk("golden", layers=layers, upper=None, uid=0)
    assert await asyncio.to_thread(read_disk, image.path, image.size) == compose(layers, image.size)


async def test_what_a_disk_refuses(blockd):
    image = await open_empty(blockd)

    def refusals() -> None:
        with ExportedFile(image.path) as disk:
            for offset, length in ((1, 512), (0, 100), (512, 511)):
                with pytest.raises(OSError, match="Invalid argument"):
                    disk.write(offset, bytes(length))
                with pytest.raises(OSError, match="Invalid argument"):
                    disk.read(offset, length)
            with pytest.raises(OSError, match="Invalid argument"):
                disk.punch(1, 512)
            with pytest.raises(OSError, match="No space"):
                disk.write(image.size, bytes(512))
            assert disk.read(image.size, 512) == b""
            with pytest.raises(OSError, match="not permitted"):
                os.truncate(image.path, 512)
            with pytest.raises(OSError, match="not supported"):
                disk.fallocate(0, 0, 512)
            disk.punch(image.size - 512, 4096)  # what is past the end is cut off, as the kernel may ask for it

    await asyncio.to_thread(refusals)
    frozen = await blockd.client.open_disk(
        "frozen", layers=[(await blockd.client.snapshot("disk", blockd.layer("a"))).path], upper=None, uid=0
    )
    with ExportedFile(frozen.path) as disk, pytest.raises(OSError, match="Read-only"):
        await asyncio.to_thread(disk.write, 0, bytes(512))


async def test_a_disk_belongs_to_its_uid_and_nobody_can_look_for_it(blockd):
    image = await blockd.client.open_disk("disk", layers=[], upper=blockd.new_upper(), uid=UID + 1, size=MIB)
    attributes = image.path.stat()
    assert (attributes.st_uid, stat.S_IMODE(attributes.st_mode), attributes.st_size) == (UID + 1, 0o600, MIB)
    assert len(image.path.name) == 32
    with pytest.raises(PermissionError):
        os.listdir(blockd.mount)

    async def opens(uid: int) -> bool:
        reader = await asyncio.create_subprocess_exec(
            "/bin/dd",
            f"if={image.path}",
            "of=/dev/null",
            "bs=4096",
            "count=1",
            user=uid,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await reader.wait() == 0

    assert await opens(UID + 1)
    assert not await opens(UID + 2)


async def test_opening_is_idempotent_and_an_upper_belongs_to_one_image(blockd):
    upper = blockd.new_upper()
    request = {"layers": [], "upper": upper, "uid": 0, "size": MIB}
    first = await blockd.client.open_disk("disk", **request)
    assert await blockd.client.open_disk("disk", **request) == first
    with pytest.raises(Conflict):
        await blockd.client.open_disk("disk", **{**request, "size": 2 * MIB})
    with pytest.raises(Conflict, match="in use"):
        await blockd.client.open_disk("other", **request)
    assert [image.id for image in await blockd.client.images()] == ["disk"]
    await blockd.client.close("disk", discard=True)
    await blockd.client.close("disk")
    assert list(upper.iterdir()) == []
    with pytest.raises(NotFound):
        await blockd.client.image("disk")


async def test_a_closed_image_is_gone_for_who_has_it_open(blockd):
    image = await open_empty(blockd)
    with ExportedFile(image.path) as disk:
        await blockd.client.close("disk")
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            await asyncio.to_thread(disk.read, 0, 512)
    assert not image.path.exists()


async def test_a_snapshot_that_cannot_be_made_leaves_the_disk_running(blockd):
    image = await open_empty(blockd)
    model = bytearray(image.size)
    await asyncio.to_thread(scribble, image.path, model, 1, 50)
    taken = blockd.layer("taken")
    taken.write_bytes(b"something else")
    with pytest.raises(Conflict):
        await blockd.client.snapshot("disk", taken)
    with pytest.raises(NotFound):
        await blockd.client.snapshot("disk", blockd.directory / "no" / "such" / "directory")
    with pytest.raises(OperationFailed):
        await blockd.client.snapshot("disk", blockd.directory / "not-writable")
    assert taken.read_bytes() == b"something else"
    await asyncio.to_thread(scribble, image.path, model, 2, 50)
    assert await asyncio.to_thread(read_disk, image.path, image.size) == model
    first = await blockd.client.snapshot("disk", blockd.layer("good"))
    assert await blockd.client.snapshot("disk", blockd.layer("good")) == first, "repeating it answers the same"


async def test_snapshots_under_load_are_exact(blockd):
    image = await open_empty(blockd, size=32 * MIB)
    model = bytearray(image.size)
    writing = asyncio.create_task(asyncio.to_thread(scribble, image.path, model, 5, 1500))
    layers = []
    while not writing.done():
        layers.append((await blockd.client.snapshot("disk", blockd.layer(str(len(layers))))).path)
        await asyncio.sleep(0.02)
        if len(layers) == 200:
            break
    await writing
    assert len(layers) > 3
    assert await asyncio.to_thread(read_disk, image.path, image.size) == model
    layers.append((await blockd.client.snapshot("disk", blockd.layer("last"))).path)
    assert compose(layers, image.size) == model


async def test_damaged_layers_are_refused_by_name(blockd):
    sound = (GOLDEN / "l2.lsmt").read_bytes()
    source = random.Random(1)
    for number, content in enumerate([b"", sound[:5000], sound[:-4096], source.randbytes(20000), bytes(9000)]):
        layer = blockd.layer(f"bad{number}")
        layer.write_bytes(content)
        with pytest.raises(CorruptData, match=layer.name):
            await blockd.client.verify_layer(layer)
        with pytest.raises(CorruptData, match=layer.name):
            await blockd.client.open_disk("bad", layers=[layer], upper=None, uid=0)
    facts = await blockd.client.verify_layer(GOLDEN / "l2.lsmt")
    assert (facts.virtual_size, facts.extents) == (16 * MIB, 23)


async def test_raw_images_become_base_layers_without_their_zeros(blockd):
    source = random.Random(3)
    model = bytearray(16 * MIB + 512)
    for _ in range(40):
        offset = source.randrange(len(model) // 512) * 512
        model[offset : offset + 512] = source.randbytes(512)
    model[-512:] = source.randbytes(512)
    raw = blockd.directory / "raw"
    raw.write_bytes(model)
    raw.chmod(0o600)
    base = await blockd.client.import_raw(raw, blockd.layer("base"))
    assert base.virtual_size == len(model)
    assert base.size_bytes < 41 * 4096 + 4 * 4096
    assert compose([base.path], len(model) + 4096)[: len(model)] == model
    image = await blockd.client.open_disk("disk", layers=[base.path], upper=None, uid=0)
    assert await asyncio.to_thread(read_disk, image.path, image.size) == model
    with pytest.raises(Conflict):
        await blockd.client.import_raw(raw, base.path)
    assert [path.name for path in blockd.layers.iterdir()] == ["base"], "nothing half-made is left"
