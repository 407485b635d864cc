"""A second reader and writer of the layer format, written from docs/formats/lsmt.md alone; slow and simple."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTOR = 512
BLOCK = 4096
MAGICS = bytes.fromhex("4c534d5400010200657e63d29444084ca2d2c8ec4fcfae8a")
MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Entry:
    sector: int
    length: int
    physical: int
    zeroed: bool

    @classmethod
    def parse(cls, raw: bytes) -> "Entry":
        low, high = struct.unpack("<QQ", raw)
        return cls(low & ((1 << 50) - 1), low >> 50, high & ((1 << 55) - 1), bool(high >> 55 & 1))


@dataclass(frozen=True)
class Header:
    flags: int
    index_offset: int
    index_size: int
    virtual_size: int
    uuid: str
    parent: str

    @classmethod
    def parse(cls, block: bytes) -> "Header":
        assert block[:24] == MAGICS
        size, flags, offset, entries, virtual = struct.unpack_from("<IIQQQ", block, 24)
        assert size == 390
        assert (block[132], block[133]) == (1, 1)
        assert not any(block[390:]), "the rest of the block is zero"
        uuid, parent = (block[at : at + 37].rstrip(b"\0").decode() for at in (56, 93))
        return cls(flags, offset, entries, virtual, uuid, parent)


@dataclass(frozen=True)
class Layer:
    """A sealed layer, read and checked whole."""

    content: bytes
    header: Header
    trailer: Header
    entries: tuple[Entry, ...]

    @classmethod
    def read(cls, path: Path) -> "Layer":
        content = path.read_bytes()
        assert len(content) % BLOCK == 0
        header, trailer = Header.parse(content[:BLOCK]), Header.parse(content[-BLOCK:])
        assert (header.flags, trailer.flags) in ((0x07, 0x06), (0x03, 0x06), (0x23, 0x26))
        assert (header.index_offset, header.index_size) == (0, 0)
        assert (header.uuid, header.parent) == (trailer.uuid, trailer.parent)
        start, end = trailer.index_offset, trailer.index_offset + 16 * trailer.index_size
        assert start % SECTOR == 0
        raw = content[start:end]
        entries = tuple(entry for at in range(0, len(raw), 16) if (entry := Entry.parse(raw[at : at + 16])).length)
        padding = content[end:-BLOCK]
        if header.flags == 0x07:
            assert trailer.index_size % 256 == 0
            assert not any(padding)
        else:
            ones = -(end - start) % SECTOR
            assert padding[:ones] == b"\xff" * ones
            assert not any(padding[ones:])
        position = 0
        for entry in entries:
            assert entry.sector >= position, "sorted and disjoint"
            position = entry.sector + entry.length
            assert entry.zeroed or (entry.physical >= 8 and (entry.physical + entry.length) * SECTOR <= start), (
                "data lies between header and index"
            )
        return cls(content, header, trailer, entries)

    @property
    def stored_bytes(self) -> int:
        return sum(entry.length * SECTOR for entry in self.entries if not entry.zeroed)


def compose(layers: Sequence[Path], size: int) -> bytes:
    """What a stack of layers, bottom to top, holds."""
    image = bytearray(size)
    for layer in map(Layer.read, layers):
        for entry in layer.entries:
            start, length = entry.sector * SECTOR, entry.length * SECTOR
            at = entry.physical * SECTOR
            image[start : start + length] = bytes(length) if entry.zeroed else layer.content[at : at + length]
    return bytes(image)


def _mix(value: int) -> int:
    value ^= value >> 30
    value = value * 0xBF58476D1CE4E5B9 & MASK64
    value ^= value >> 27
    value = value * 0x94D049BB133111EB & MASK64
    return value ^ value >> 31


def pattern(fill: str, seed: int, offset: int, length: int) -> bytes:
    """The content that the golden files' operations write at `offset`."""
    word: dict[str, Callable[[int], int]] = {
        "const": lambda _: seed * 0x0101010101010101,
        "ctr": lambda w: (seed << 40) ^ w,
        "rnd": lambda w: _mix(((seed << 40) + w) * 0x9E3779B97F4A7C15 & MASK64),
    }
    return b"".join(struct.pack("<Q", word[fill](w)) for w in range(offset // 8, (offset + length) // 8))
