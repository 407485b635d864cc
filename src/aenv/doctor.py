"""`aenv doctor`: what this host can do for a node, what it cannot, and what to do about it. Changes nothing."""

import asyncio
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from aenv.errors import AenvError
from aenv.guest.assets import asset_status
from aenv.network.host import require_host
from aenv.settings import Settings
from aenv.vmm.cgroup import ControlGroups
from aenv.vmm.qemu.probe import probe

MIB = 1024 * 1024


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


async def examine(settings: Settings) -> list[Finding]:
    """Every check, in the order a person would make them. Takes a few seconds: KVM is tried with a real guest."""
    findings = [_python(), _root(), _kernel()]
    findings.append(await _vmm(settings))
    findings += [
        _attempt("network", lambda: f"network namespaces, tap, {require_host()}"),
        _device("FUSE", Path("/dev/fuse"), "load the kernel module fuse; in a container, pass /dev/fuse through"),
        _ublk(),
        *_cgroups(),
        _programs(),
        *_assets(settings),
        _space(settings),
        _memory(settings),
    ]
    return findings


def _python() -> Finding:
    return Finding("Python", Verdict.OK, platform.python_version())


def _root() -> Finding:
    if os.geteuid() == 0:
        return Finding("root", Verdict.OK, "yes")
    return Finding("root", Verdict.MISSING, f"uid {os.geteuid()}", "run `aenv server` with sudo")


def _kernel() -> Finding:
    return Finding("host", Verdict.OK, f"Linux {platform.release()} {platform.machine()}")


async def _vmm(settings: Settings) -> Finding:
    try:
        host = await probe(settings.accelerator)
    except AenvError as error:
        return Finding("QEMU", Verdict.MISSING, error.message, error.hint)
    detail = f"QEMU {host.version}, {host.reason}"
    if host.reason.startswith("emulation"):
        return Finding(
            "QEMU",
            Verdict.WARNING,
            detail,
            "works, but much slower than KVM; use a host whose KVM runs guests",
        )
    return Finding("QEMU", Verdict.OK, detail)


def _attempt(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, Verdict.OK, check())
    except AenvError as error:
        return Finding(what, Verdict.MISSING, error.message, error.hint)


def _device(what: str, path: Path, remedy: str) -> Finding:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Finding(what, Verdict.MISSING, f"{path}: {error.strerror}", remedy)
    return Finding(what, Verdict.OK, str(path))


def _ublk() -> Finding:
    if Path("/dev/ublk-control").exists():
        return Finding(
            "ublk",
            Verdict.OK,
            "/dev/ublk-control is there; disks go through FUSE all the same in this version",
        )
    return Finding("ublk", Verdict.OK, "not there; disks go through FUSE")


def _cgroups() -> list[Finding]:
    problems = ControlGroups("doctor").problems
    if not problems:
        return [Finding("control groups", Verdict.OK, "memory, pids, cpu")]
    remedy = "mount cgroup v2 with the memory, pids and cpu controllers"
    return [Finding("control groups", Verdict.WARNING, problem, remedy) for problem in problems]


def _programs() -> Finding:
    try:
        from aenv_native import program  # noqa: PLC0415 — only servers have it

        for name in ("envd", "blockd", "edge"):
            program(name)
    except (ImportError, FileNotFoundError) as error:
        return Finding("programs", Verdict.MISSING, str(error), "run `make setup`, or install aenv[server]")
    return Finding("programs", Verdict.OK, "envd, blockd, edge")


def _assets(settings: Settings) -> list[Finding]:
    return [
        Finding(f"guest: {status.name}", Verdict.OK, f"{status.path} ({status.size_bytes // MIB} MiB)")
        if status.present
        else Finding(
            f"guest: {status.name}",
            Verdict.WARNING,
            "not built yet",
            "built at the first start, or now by `aenv assets build`",
        )
        for status in asset_status(settings)
    ]


def _space(settings: Settings) -> Finding:
    path = settings.home
    while not path.exists():
        path = path.parent
    free_mib = shutil.disk_usage(path).free // MIB
    detail = f"{free_mib} MiB free for {settings.home}"
    if free_mib < settings.min_free_disk_mib:
        return Finding(
            "disk",
            Verdict.MISSING,
            detail,
            f"{settings.min_free_disk_mib} MiB are needed: free some, or move AENV_HOME",
        )
    return Finding("disk", Verdict.OK, detail)


def _memory(settings: Settings) -> Finding:
    total_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    fits = int(total_mib * settings.memory_overcommit) // settings.template_memory_mib
    return Finding(
        "memory",
        Verdict.OK,
        f"{total_mib} MiB: {fits} sandboxes of `base` are admitted (overcommit {settings.memory_overcommit:g})",
    )


def run(settings: Settings) -> list[Finding]:
    return asyncio.run(examine(settings))
