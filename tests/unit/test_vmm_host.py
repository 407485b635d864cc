"""What is read from the host: memory maps, clock rate, QEMU's version."""

import os
from pathlib import Path

import pytest

from aenv.errors import HostUnsupported, SandboxLost
from aenv.vmm.contract import MemoryRange
from aenv.vmm.proc import mapped_ranges, read_stats
from aenv.vmm.qemu.probe import probe, probe_version
from aenv.vmm.tsc import measure_tsc_khz

MAPS = """\
55d0a0000000-55d0a0001000 r--p 00000000 08:01 77                         /usr/bin/qemu
7f0000200000-7f0000300000 rw-p 00100000 00:2a 42                         /images/memory image (deleted)
7f0000000000-7f0000100000 rw-p 00000000 00:2a 42                         /images/memory image (deleted)
7f0000400000-7f0000500000 rw-s 00200000 00:2a 42                         /images/memory image
7f0000600000-7f0000601000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
"""


def test_private_mappings_of_the_image_in_order() -> None:
    assert mapped_ranges(MAPS, 42) == [
        MemoryRange(guest_offset=0, host_address=0x7F0000000000, length=0x100000),
        MemoryRange(guest_offset=0x100000, host_address=0x7F0000200000, length=0x100000),
    ]
    assert mapped_ranges(MAPS, 43) == []


def test_stats_of_this_process() -> None:
    stats = read_stats(os.getpid())
    assert stats.cpu_s > 0
    assert 0 < stats.private_bytes < stats.resident_bytes
    with pytest.raises(SandboxLost):
        read_stats(4_000_000)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86_64 only")
def test_the_clock_rate_is_the_same_each_time() -> None:
    rates = [measure_tsc_khz() for _ in range(3)]
    assert max(rates) - min(rates) < min(rates) * 100e-6


async def test_an_accelerator_must_be_one() -> None:
    with pytest.raises(HostUnsupported, match="nonsense"):
        await probe("nonsense")


@pytest.mark.parametrize(
    ("output", "accepted"),
    [
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg)", "7.2.22"),
        ("QEMU emulator version 10.0.2", "10.0.2"),
        ("QEMU emulator version 6.2.0 (Debian)", None),
        ("something else", None),
    ],
)
async def test_qemu_version(tmp_path: Path, output: str, accepted: str | None) -> None:
    binary = tmp_path / "qemu"
    binary.write_text(f"#!/bin/sh\necho '{output}'\n")
    binary.chmod(0o755)
    if accepted:
        assert await probe_version(str(binary)) == accepted
    else:
        with pytest.raises(HostUnsupported):
            await probe_version(str(binary))
