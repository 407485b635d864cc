"""Kernel images and modules, made up and hostile."""

import gzip
import lzma
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import CorruptData, HostUnsupported, OperationFailed
from aenv.guest.assets import require_static
from aenv.guest.commands import run
from aenv.guest.kernel import extract_elf, module_dependencies

ELF = b"\x7fELF" + bytes(range(256)) * 64
SIZE = struct.pack("<I", len(ELF))


def bzimage(payload: bytes, *, protocol: int = 0x020F) -> bytes:
    """A boot sector, one sector of setup, then the payload 64 bytes into the protected-mode code."""
    header = bytearray(1024)
    header[0x1F1] = 1
    struct.pack_into("<4sH", header, 0x202, b"HdrS", protocol)
    struct.pack_into("<II", header, 0x248, 64, len(payload))
    return bytes(header) + bytes(64) + payload + b"after"


def by_tool(*command: str) -> bytes:
    return subprocess.run(command, input=ELF, stdout=subprocess.PIPE, check=True).stdout


PAYLOADS: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: gzip.compress(ELF),
    "xz": lambda: lzma.compress(ELF) + SIZE,
    "lz4": lambda: by_tool("lz4", "-l", "-c") + SIZE,
    "zstd": lambda: by_tool("zstd", "-c") + SIZE,
}


@pytest.mark.parametrize("compression", PAYLOADS)
async def test_extracts(compression: str) -> None:
    assert await extract_elf(bzimage(PAYLOADS[compression]())) == ELF


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"", "too short"),
        (bytes(4096), "no bzImage"),
        (bzimage(gzip.compress(ELF), protocol=0x0207), "no bzImage"),
        (bzimage(gzip.compress(ELF))[:-200], "no bzImage"),
        (bzimage(b"LZMA" + bytes(60)), "compression is unknown"),
        (bzimage(gzip.compress(b"not a kernel")), "no ELF"),
        (bzimage(gzip.compress(ELF)[:-40] + SIZE), "has .* bytes"),
        (bzimage(lzma.compress(ELF)[:-40] + SIZE), "does not decompress"),
        (bzimage(b"\x02\x21\x4c\x18" + bytes(60)), "bytes|does not decompress"),
    ],
)
async def test_refuses(image: bytes, reason: str) -> None:
    with pytest.raises(CorruptData, match=reason):
        await extract_elf(image)


def test_dependencies_of_a_module() -> None:
    assert module_dependencies(b"ELF..\0license=GPL\0depends=virtio,virtio-ring\0retpoline=Y\0") == [
        "virtio",
        "virtio_ring",
    ]
    assert module_dependencies(b"\0depends=\0") == []


@given(st.binary(max_size=200))
def test_hostile_modules(data: bytes) -> None:
    with pytest.raises(CorruptData):
        module_dependencies(data)


def test_a_program_with_a_loader_is_not_static(tmp_path: Path) -> None:
    with pytest.raises(HostUnsupported, match="static"):
        require_static(Path("/bin/sh"))
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(HostUnsupported, match="static"):
        require_static(script)


async def test_missing_and_failing_programs() -> None:
    with pytest.raises(HostUnsupported, match=r"not installed.*install the package"):
        await run("aenv-no-such-program")
    with pytest.raises(OperationFailed, match="status 3: said why"):
        await run("sh", "-c", "echo said why >&2; exit 3")
