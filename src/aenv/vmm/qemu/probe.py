"""What QEMU and the accelerator of this host can do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from aenv.errors import HostUnsupported
from aenv.vmm.qemu.command import Accelerator, Platform
from aenv.vmm.qemu.selftest import run_kvm_guest
from aenv.vmm.tsc import measure_tsc_khz

_BINARY = "qemu-system-x86_64"
_OLDEST = (7, 2)
_CX16_SOUND = (10, 0)
"""Before this, a guest using cmpxchg16b under multi-threaded emulation crashes at random."""
_EMULATED_CPU = "Haswell-v4,-pcid,-x2apic,-tsc-deadline,-invpcid,-spec-ctrl"
"""Without what emulation has not; it would be left out anyway, with a warning for each vCPU."""
_VERSION_TIMEOUT_S = 30.0
_KVM = Path("/dev/kvm")
_INSTALL = "apt-get install qemu-system-x86"


@dataclass(frozen=True)
class Host:
    version: str
    platform: Platform
    cpu_model: str
    """As saved states name it: what -cpu gives, and for `host` which CPU that is."""
    reason: str
    """Why this accelerator, for people."""
    groups: tuple[int, ...] = ()
    """Supplementary groups a VMM process needs."""
    warnings: list[str] = field(default_factory=list)


async def probe(accelerator: str) -> Host:
    """Find QEMU and choose the accelerator: `kvm`, `tcg`, or `auto`, which is KVM where a guest was seen to
    run on it.

    Takes up to a few seconds. Raises: HostUnsupported.
    """
    if accelerator not in ("auto", *Accelerator):
        raise HostUnsupported(f"there is no accelerator {accelerator!r}", hint="set it to auto, kvm or tcg")
    architecture = os.uname().machine
    if architecture != "x86_64":
        raise HostUnsupported(f"the QEMU driver runs on x86_64, not {architecture}")
    binary = shutil.which(_BINARY)
    if binary is None:
        raise HostUnsupported(f"{_BINARY} is not installed", hint=_INSTALL)
    if shutil.which("setpriv") is None:
        raise HostUnsupported("setpriv is not installed", hint="apt-get install util-linux")
    version = await probe_version(binary)
    tsc_khz = await asyncio.to_thread(measure_tsc_khz)
    problem = "" if accelerator == Accelerator.TCG else await probe_kvm(binary)
    if accelerator == Accelerator.KVM and problem:
        raise HostUnsupported(
            f"KVM was asked for but cannot be used: {problem}", hint="set AENV_ACCELERATOR to auto or tcg"
        )
    if accelerator == Accelerator.TCG or problem:
        cpu = _EMULATED_CPU if _numbers(version) >= _CX16_SOUND else f"{_EMULATED_CPU},-cx16"
        reason = f"emulation (TCG): {problem or 'chosen by the setting'}"
        return Host(version, Platform(binary, Accelerator.TCG, cpu, tsc_khz), cpu, reason)
    platform = Platform(binary, Accelerator.KVM, "host", tsc_khz)
    return Host(version, platform, f"host {_host_cpu()}", "KVM: a guest ran on it", _kvm_groups())


async def probe_version(binary: str) -> str:
    """Raises: HostUnsupported for a QEMU that is too old or does not tell."""
    process = await asyncio.create_subprocess_exec(
        binary,
        "--version",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_VERSION_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise HostUnsupported(f"{binary} --version does not answer") from error
    match = re.search(rb"version (\d+\.\d+(\.\d+)?)", output)
    if match is None:
        raise HostUnsupported(f"{binary} --version says {output[:200]!r}", hint=_INSTALL)
    version = match[1].decode()
    if _numbers(version) < _OLDEST:
        raise HostUnsupported(
            f"QEMU {version} is too old: 7.2 or later is needed", hint="Debian 12 and Ubuntu 24.04 have it"
        )
    return version


async def probe_kvm(binary: str) -> str:
    """Run a guest on KVM. Returns "" when it ran, else what is wrong."""
    if not _KVM.exists():
        return "there is no /dev/kvm"
    try:
        os.close(os.open(_KVM, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm cannot be opened: {error.strerror}"
    if problem := await run_kvm_guest(binary):
        return problem
    if not _open_to_all() and not _kvm_groups():
        return "/dev/kvm is for root alone, but VMs run as other users; chgrp it to kvm, with mode 0660"
    return ""


def _open_to_all() -> bool:
    return _KVM.stat().st_mode & 0o006 == 0o006


def _kvm_groups() -> tuple[int, ...]:
    """The group a VMM process has to be in to open /dev/kvm, if any lets it. Never root's."""
    status = _KVM.stat()
    usable = status.st_mode & 0o060 == 0o060 and status.st_gid != 0
    return (status.st_gid,) if usable and not _open_to_all() else ()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _host_cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"
