"""Memory images as plain sparse files: the least that a driver needs in place of a storage engine, and the
floor for benchmarks.
"""

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aenv.vmm.contract import ProcessMemory, SparseDiff

PAGE = 4096
_PRESENT = 1 << 63
_SWAPPED = 1 << 62
_FILE_PAGE = 1 << 61
_CHUNK = 1 << 20
_PAGES_AT_ONCE = 256


@dataclass(frozen=True)
class Capture:
    """Pages that changed since the memory was mapped: {offset in the guest: bytes}, neighbours joined."""

    extents: dict[int, bytes] = field(repr=False)

    @property
    def pages(self) -> int:
        return sum(len(data) for data in self.extents.values()) // PAGE


def create_image(path: Path, size: int, uid: int) -> None:
    """An empty image owned by `uid`."""
    with path.open("xb") as file:
        file.truncate(size)
    os.chown(path, uid, uid)
    path.chmod(0o600)


def capture(memory: ProcessMemory | SparseDiff) -> Capture:
    """Read the dirty pages of a suspended VM, and close its descriptors or remove its file."""
    if isinstance(memory, SparseDiff):
        try:
            with memory.path.open("rb") as file:
                extents = {start: os.pread(file.fileno(), end - start, start) for start, end in _data(file.fileno())}
        finally:
            memory.path.unlink()
        return Capture(extents)
    try:
        extents = {}
        for part in memory.ranges:
            for first, count in _private_runs(memory.pagemap_fd, part.host_address, part.length):
                address, length = part.host_address + first * PAGE, count * PAGE
                extents[part.guest_offset + first * PAGE] = os.pread(memory.mem_fd, length, address)
        return Capture(extents)
    finally:
        os.close(memory.mem_fd)
        os.close(memory.pagemap_fd)


def compose(below: Path, captured: Capture, image: Path) -> None:
    """Fill the existing, empty `image` with the content of `below` and the captured pages over it."""
    with below.open("rb") as source, image.open("r+b") as target:
        for start, end in _data(source.fileno()):
            for offset in range(start, end, _CHUNK):
                os.pwrite(target.fileno(), os.pread(source.fileno(), min(_CHUNK, end - offset), offset), offset)
        for offset, data in captured.extents.items():
            os.pwrite(target.fileno(), data, offset)


def _data(descriptor: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the data extents of a sparse file."""
    end, size = 0, os.fstat(descriptor).st_size
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:
            return
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, end


def _private_runs(pagemap: int, address: int, length: int) -> Iterator[tuple[int, int]]:
    """(first page, count) of runs of pages that are the process's own, at most 1 MiB each."""
    entries = array("Q", os.pread(pagemap, length // PAGE * 8, address // PAGE * 8))
    first = None
    for number, entry in enumerate(entries):
        own = bool(entry & _SWAPPED) or (bool(entry & _PRESENT) and not entry & _FILE_PAGE)
        if first is not None and (not own or number - first == _PAGES_AT_ONCE):
            yield first, number - first
            first = None
        if own and first is None:
            first = number
    if first is not None:
        yield first, len(entries) - first
