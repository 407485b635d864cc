"""One run of the nested VM: start, stream the command's output, take its exit status."""

import asyncio
import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv.guest.commands import run
from aenv.vmm.tsc import measure_tsc_khz
from tests.nested.kernel import NestedKernel, ensure_kernel, find_virtiofsd, qemu_numbers

_CX16_SOUND = (10, 0)
_UP_TIMEOUT_S = 120.0
"""From the start of QEMU to the first word of the script; 10 to 20 s as a rule. Only a start is tried again: a command
that ran is not.
"""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "LANG", "XDG_CACHE_HOME")
_PREFIX = "AENV_"
_UP = b"\x1enested-up\x1e"


class NestedError(Exception):
    """The VM did not come up or did not end: the command was not run to its end."""


@dataclass(frozen=True)
class Size:
    vcpus: int = 2
    memory_mib: int = 4096
    scratch_gib: int = 16
    """Most that may be written anywhere inside; sparse."""


async def run_nested(command: Sequence[str], *, deadline_s: float, size: Size, attempts: int = 2) -> int:
    """Run `command` in the same directory and environment (PATH, PYTHONPATH, HOME, AENV_*) inside; its output goes to
    our standard output as it comes. Returns its exit status.

    Raises: NestedError when the VM does not come up in any attempt, or the command does not end by the deadline.
    """
    kernel = await ensure_kernel()
    for attempt in range(1, attempts + 1):
        with tempfile.TemporaryDirectory(prefix="aenv-nested-", dir="/var/tmp") as directory:
            path = Path(directory)
            _write_script(path / "script", command)
            try:
                return await _run_once(kernel, path, deadline_s, size)
            except _NotUpError as error:
                print(f"nested: attempt {attempt} of {attempts}: {error}", file=sys.stderr, flush=True)
    raise NestedError(f"the VM did not come up in {attempts} attempts")


class _NotUpError(Exception):
    pass


async def _run_once(kernel: NestedKernel, directory: Path, deadline_s: float, size: Size) -> int:
    scratch = directory / "scratch"
    with scratch.open("xb") as file:
        file.truncate(size.scratch_gib << 30)
    await run("mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1,nodiscard", "-O", "^has_journal", scratch)
    log = directory / "serial.log"
    async with _shared_root(directory) as socket:
        with (directory / "qemu.log").open("wb") as messages:
            qemu = await asyncio.create_subprocess_exec(
                *_arguments(kernel, directory, socket, size),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=messages,  # a warning for each thing of a real EPYC that emulation has not
            )
        try:
            assert qemu.stdout is not None
            try:
                async with asyncio.timeout(_UP_TIMEOUT_S):
                    await qemu.stdout.readuntil(_UP)
            except (TimeoutError, asyncio.IncompleteReadError) as error:
                told = _tail(log) + _tail(directory / "qemu.log")
                raise _NotUpError(f"{error!r}; its log ends:\n{told}") from error
            try:
                async with asyncio.timeout(deadline_s):
                    while part := await qemu.stdout.read(65536):
                        sys.stdout.buffer.write(part)
                        sys.stdout.flush()
                    await qemu.wait()
            except TimeoutError as error:
                raise NestedError(f"the command did not end in {deadline_s:.0f} s") from error
        finally:
            if qemu.returncode is None:
                qemu.kill()
            await qemu.wait()
    try:
        return int((directory / "status").read_text())
    except (OSError, ValueError) as error:
        raise NestedError(f"the VM ended without a status; its log ends:\n{_tail(log)}") from error


@contextlib.asynccontextmanager
async def _shared_root(directory: Path) -> AsyncIterator[Path]:
    """virtiofsd sharing / until the end."""
    program, socket = find_virtiofsd(), directory / "root.sock"
    assert program is not None
    old = program.startswith("/usr/lib/qemu")
    options = ["-o", "source=/,sandbox=chroot,cache=always,xattr"] if old else ["--shared-dir=/", "--sandbox=chroot"]
    if not old:
        options += ["--cache=always", "--xattr"]
    daemon = await asyncio.create_subprocess_exec(
        *(program, f"--socket-path={socket}", *options),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=(directory / "virtiofsd.log").open("wb"),
    )
    try:
        for _ in range(600):
            if socket.exists() or daemon.returncode is not None:
                break
            await asyncio.sleep(0.05)
        if not socket.exists():
            raise NestedError(f"virtiofsd did not start: {_tail(directory / 'virtiofsd.log')}")
        yield socket
    finally:
        with contextlib.suppress(TimeoutError):  # it ends with its only client
            async with asyncio.timeout(5):
                await daemon.wait()
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()


def _arguments(kernel: NestedKernel, directory: Path, socket: Path, size: Size) -> list[str]:
    cpu = "EPYC" if qemu_numbers() >= _CX16_SOUND else "EPYC,-cx16"
    clock = f"no_timer_check lpj=1000000 tsc_early_khz={measure_tsc_khz()}"
    return [
        *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-machine", "q35,memory-backend=ram", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", cpu),
        *("-smp", str(size.vcpus), "-m", str(size.memory_mib)),
        *("-object", f"memory-backend-memfd,id=ram,size={size.memory_mib}M,share=on"),
        *("-kernel", str(kernel.image), "-initrd", str(kernel.initramfs)),
        *("-append", f"console=ttyS0 quiet panic=-1 mitigations=off {clock} init.directory={directory}"),
        *("-chardev", f"file,id=log,path={directory}/serial.log", "-serial", "chardev:log"),
        *("-chardev", "stdio,id=output,signal=off", "-device", "virtio-serial-pci"),
        *("-device", "virtconsole,chardev=output"),
        *("-drive", f"file={directory}/scratch,if=virtio,format=raw,cache=unsafe,discard=unmap"),
        *("-chardev", f"socket,id=root,path={socket}", "-device", "vhost-user-fs-pci,chardev=root,tag=host"),
        *("-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng"),
    ]


def _write_script(path: Path, command: Sequence[str]) -> None:
    lines = ["set -e", "stty raw -F /dev/hvc0", r"printf '\036nested-up\036'", "ip link set lo up || true"]
    lines += ["mkdir -p /nested/tmp && chmod 1777 /nested/tmp", "ulimit -n 65536"]
    for name, value in sorted(_kept(os.environ).items()):
        lines.append(f"export {name}={shlex.quote(value)}")
    # Not in the overlay: tests want a file system with all features.
    lines += [
        "export TMPDIR=/nested/tmp",
        "export AENV_NESTED=1",
        f"cd {shlex.quote(os.getcwd())}",
        shlex.join(command),
    ]
    path.write_text("\n".join(lines) + "\n")


def _kept(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name in _ENVIRONMENT or name.startswith(_PREFIX)}


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-3000:].decode(errors="replace")
    return "(none)"
