"""Memory images: shared, pending, never written; and what is captured from a process that mapped one."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.blockd import Blockd, ExportedFile, needs_fuse, running_blockd
from tests.support.lsmt import Layer, compose

from aenv.errors import Conflict, OperationFailed

pytestmark = needs_fuse
PAGE = 4096
MIB = 1 << 20


@pytest.fixture
async def blockd():
    async with running_blockd() as blockd:
        yield blockd


@dataclass(frozen=True)
class Range:
    guest_offset: int
    host_address: int
    length: int


def memory_file(blockd: Blockd, name: str, size: int, pages: dict[int, bytes]) -> Path:
    """A sparse file of `size` bytes with these pages."""
    path = blockd.directory / name
    with path.open("wb") as file:
        file.truncate(size)
        for page, content in pages.items():
            file.seek(page * PAGE)
            file.write(content)
    return path


async def memory_layer(blockd: Blockd, name: str, size: int, pages: dict[int, bytes]) -> Path:
    layer = await blockd.client.import_memory(
        memory_file(blockd, f"{name}.diff", size, pages), blockd.layer(name), size=size
    )
    return layer.path


# Maps a file privately, changes pages as told on standard input, says where it is mapped, and waits.
TENANT = """
import ctypes, mmap, os, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(address, flush=True)
for line in sys.stdin:
    what, page, value = line.split()
    at = int(page) * 4096
    if what == "write":
        memory[at : at + 4096] = bytes([int(value)]) * 4096
    elif what == "touch":
        memory[at]
    elif what == "drop":
        memory.madvise(mmap.MADV_DONTNEED, at, 4096)
    print("done", flush=True)
"""


class Tenant:
    """A process in place of a VMM."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TENANT, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, what: str, page: int, value: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {page} {value}\n")
        self.process.stdin.flush()
        assert self._line() == "done\n"

    async def capture(self, blockd: Blockd, name: str, ranges: list[Range], size: int):
        with contextlib.ExitStack() as stack:
            descriptors = []
            for file in ("mem", "pagemap"):
                descriptors.append(os.open(f"/proc/{self.process.pid}/{file}", os.O_RDONLY))
                stack.callback(os.close, descriptors[-1])
            return await blockd.client.capture_memory(
                blockd.layer(name), size=size, ranges=ranges, mem_fd=descriptors[0], pagemap_fd=descriptors[1]
            )


@contextlib.contextmanager
def running_tenant(path: Path) -> Iterator[Tenant]:
    tenant = Tenant(path)
    try:
        yield tenant
    finally:
        tenant.process.kill()
        tenant.process.communicate()


async def test_captures_store_the_private_pages_and_compose_to_the_memory(blockd):
    size = 8 * MIB
    source = random.Random(1)
    base = {page: source.randbytes(PAGE) for page in range(0, 1024, 3)}
    model = bytearray(size)
    for page, content in base.items():
        model[page * PAGE : (page + 1) * PAGE] = content
    layers = [await memory_layer(blockd, "base", size, base)]
    for generation in range(3):
        image = await blockd.client.open_memory(f"memory{generation}", layers=layers, uid=0, size=size)

        def tenancy(path: Path, generation: int) -> tuple[Tenant, contextlib.ExitStack, int, int]:
            stack = contextlib.ExitStack()
            tenant = stack.enter_context(running_tenant(path))
            written = source.sample(range(size // PAGE), 100)
            for page in written[:70]:
                tenant.do("write", page, 1 + generation)
                model[page * PAGE : (page + 1) * PAGE] = bytes([1 + generation]) * PAGE
            for page in written[70:90]:
                tenant.do("write", page, 0)
                model[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
            for page in written[90:]:  # the VMM gave these back: what is below shows again
                tenant.do("write", page, 99)
                tenant.do("drop", page)
            for page in source.sample(range(size // PAGE), 200):
                tenant.do("touch", page)
            return tenant, stack, 70, 20

        tenant, stack, data, zero = await asyncio.to_thread(tenancy, image.path, generation)
        with stack:
            half = size // 2
            ranges = [Range(half, tenant.address + half, half), Range(0, tenant.address, half)]
            captured = await tenant.capture(blockd, f"capture{generation}", ranges, size)
        assert (captured.pages, captured.zero_pages) == (data, zero)
        assert captured.size_bytes == captured.path.stat().st_size <= (data + 4) * PAGE
        layers.append(captured.path)
        assert compose(layers, size) == model
        assert Layer.read(captured.path).header.virtual_size == size


async def test_a_gap_between_ranges_is_where_the_guest_has_no_memory(blockd):
    """Ranges may lie anywhere in the process and leave parts of the image out."""
    size = 4 * MIB
    image = await blockd.client.open_memory("memory", layers=[], uid=0, size=size)
    with running_tenant(image.path) as tenant:
        await asyncio.to_thread(tenant.do, "write", 5, 7)
        await asyncio.to_thread(tenant.do, "write", 900, 8)
        ranges = [Range(2 * size, tenant.address, MIB)]
        captured = await tenant.capture(blockd, "moved", ranges, 4 * size)
        assert captured.pages == 1
        content = compose([captured.path], 4 * size)
        assert content[2 * size + 5 * PAGE : 2 * size + 6 * PAGE] == bytes([7]) * PAGE
        assert content.count(0) == len(content) - PAGE
        for wrong in (
            [Range(0, tenant.address, 100)],
            [Range(0, tenant.address + 1, PAGE)],
            [Range(0, tenant.address, size), Range(size - PAGE, tenant.address, size)],
            [Range(4 * size, tenant.address, PAGE)],
            [Range(0, (1 << 64) - PAGE, PAGE)],
        ):
            with pytest.raises(OperationFailed):
                await tenant.capture(blockd, "wrong", wrong, 4 * size)
    with pytest.raises((OperationFailed, OSError)):
        await tenant.capture(blockd, "gone", ranges, 4 * size)
    assert [path.name for path in blockd.layers.iterdir()] == ["moved"]


async def test_a_sparse_diff_becomes_data_and_zeroed_mappings(blockd):
    size = 4 * MIB
    below = await memory_layer(blockd, "below", size, {page: b"x" * PAGE for page in range(1024)})
    diff = memory_file(blockd, "diff", size, {3: b"y" * PAGE, 4: bytes(PAGE), 1023: b"z" * PAGE})
    layer = await blockd.client.import_memory(diff, blockd.layer("above"), size=size)
    model = bytearray(b"x" * size)
    for page, value in ((3, b"y"), (4, b"\0"), (1023, b"z")):
        model[page * PAGE : (page + 1) * PAGE] = value * PAGE
    assert (layer.pages, layer.zero_pages) == (2, 1)
    assert compose([below, layer.path], size) == model


async def test_equal_stacks_share_an_inode_and_nobody_can_write(blockd):
    size = 4 * MIB
    layer = await memory_layer(blockd, "layer", size, {7: b"q" * PAGE})
    first = await blockd.client.open_memory("first", layers=[layer], uid=1, size=size)
    second = await blockd.client.open_memory("second", layers=[layer], uid=2, size=size)
    assert first.path.stat().st_ino == second.path.stat().st_ino
    await blockd.client.close("first")
    assert second.path.read_bytes() == compose([layer], size)

    def attempts() -> None:
        with ExportedFile(second.path, os.O_RDWR) as memory:
            with pytest.raises(OSError, match="Read-only"):
                memory.write(0, b"w" * PAGE)
            with pytest.raises(OSError, match="not permitted"):
                os.truncate(second.path, 0)
            memory.punch(7 * PAGE, PAGE)  # free page reporting: answered, and ignored
            assert memory.read(7 * PAGE, PAGE) == b"q" * PAGE
            with pytest.raises(OSError, match="Read-only"):
                memory.zero_range(0, PAGE)

    await asyncio.to_thread(attempts)


async def test_reads_of_pending_memory_wait_and_nobody_else_does(blockd):
    size = 8 * MIB
    source = random.Random(5)
    pages = {page: source.randbytes(PAGE) for page in range(size // PAGE)}
    layer = await memory_layer(blockd, "layer", size, pages)
    other = await blockd.client.open_memory("other", layers=[layer], uid=0, size=size)
    images = [await blockd.client.open_pending_memory(f"pending{n}", size=size, uid=0) for n in range(8)]
    assert all(image.pending for image in images)
    content = compose([layer], size)
    with ThreadPoolExecutor(24) as threads:  # more readers than blockd has threads
        readers = [
            asyncio.get_running_loop().run_in_executor(threads, image.path.read_bytes)
            for image in images
            for _ in range(3)
        ]
        await asyncio.sleep(0.2)
        assert not any(reader.done() for reader in readers)
        assert await asyncio.wait_for(asyncio.to_thread(other.path.read_bytes), 10) == content
        completed = [await blockd.client.complete(image.id, [layer]) for image in images]
        assert all(found == content for found in await asyncio.gather(*readers))
    assert [image.path for image in completed] == [image.path for image in images]
    assert not any(image.pending for image in completed)
    assert await blockd.client.complete("pending0", [layer]) == completed[0]
    with pytest.raises(Conflict):
        await blockd.client.complete("pending0", [])
    # One that is opened afterwards finds the same object.
    late = await blockd.client.open_memory("late", layers=[layer], uid=0, size=size)
    assert late.path in [image.path for image in [*images, other]]


async def test_closing_pending_memory_ends_the_waiting(blockd):
    image = await blockd.client.open_pending_memory("pending", size=MIB, uid=0)
    reader = asyncio.create_task(asyncio.to_thread(image.path.read_bytes))
    await asyncio.sleep(0.1)
    await blockd.client.close("pending")
    with pytest.raises(OSError, match=r"Input/output error|Stale file handle"):
        await reader
