"""Starts, adopts, watches and stops the node's blockd, which outlives this process.

The ledger entry `blockd.daemon` names it by pid and start time. Knows nothing of images.
"""

import asyncio
import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from aenv.errors import HostUnsupported, OperationFailed
from aenv.ledger import Ledger
from aenv.settings import Settings
from aenv.storage.client import BlockdClient
from aenv_native import program

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 60.0
"""Ending flushes every disk."""
HEALTH_TIMEOUT_S = 5.0
_EXIT_UNAVAILABLE = 69
_LEDGER_KIND, _LEDGER_NAME = "blockd", "daemon"
_FUSE_HINT = "load the kernel module `fuse`; in a container pass the device /dev/fuse and CAP_SYS_ADMIN"


async def ensure_blockd(settings: Settings, ledger: Ledger) -> BlockdClient:
    """The blockd of this runtime directory: the living one, with its open images, or a new one.

    The directories of layers and uppers must be writable by `settings.blockd_uid`, and <home>/logs must exist.

    Raises: HostUnsupported: no FUSE, no right to mount, or no program; OperationFailed: it does not start, or
    one runs that does not answer. Nothing was started then.
    """
    client = BlockdClient(_socket(settings))
    if await _adopted(settings, ledger):
        return client
    try:
        command = [
            str(program("blockd")),
            *("--socket", str(_socket(settings)), "--mount", str(settings.runtime.absolute() / "images")),
            *("--uid", str(settings.blockd_uid)),
        ]
    except FileNotFoundError as error:
        raise HostUnsupported(str(error)) from error
    if not Path("/dev/fuse").exists():
        raise HostUnsupported("/dev/fuse is missing", hint=_FUSE_HINT)
    await _start(command, settings.home.absolute() / "logs" / "blockd.log", ledger)
    return client


async def stop_blockd(settings: Settings, ledger: Ledger) -> None:
    """End blockd: it flushes its disks and unmounts. VMs that still use an image get I/O errors. Idempotent.

    One that does not end in time is killed; what was acknowledged to its VMs is safe even so.
    """
    pid = _recorded(ledger)
    if pid is not None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            if await _wait_for_end(pid, STOP_TIMEOUT_S):
                break
    _socket(settings).unlink(missing_ok=True)
    ledger.erase(_LEDGER_KIND, _LEDGER_NAME)


async def blockd_ended(ledger: Ledger) -> None:
    """Return when the blockd in the ledger has ended; at once when there is none."""
    pid = _recorded(ledger)
    if pid is not None:
        await _wait_for_end(pid, None)


def _socket(settings: Settings) -> Path:
    return settings.runtime.absolute() / "blockd.sock"


async def _adopted(settings: Settings, ledger: Ledger) -> bool:
    """Whether a living blockd answers; one whose entry is missing, because its server died at once, is entered."""
    recorded = _recorded(ledger)
    try:
        health = await BlockdClient(_socket(settings), timeout_s=HEALTH_TIMEOUT_S).health()
    except OperationFailed as error:
        # One that is just dying has closed its socket before it is seen to end.
        if recorded is None or await _wait_for_end(recorded, HEALTH_TIMEOUT_S):
            return False
        raise OperationFailed(
            f"blockd (pid {recorded}) runs but does not answer",
            hint="ending it also ends the sandboxes whose disks it serves; then start again",
        ) from error
    if recorded is None:
        ledger.record(_LEDGER_KIND, _LEDGER_NAME, pid=health.pid, start_time=_start_time(health.pid))
    return True


async def _start(command: list[str], log_path: Path, ledger: Ledger) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    log_start = os.fstat(log).st_size
    ready, write_end = os.pipe()
    try:
        pid = os.posix_spawn(  # noqa: ASYNC221 (returns at once)
            command[0],
            command,
            {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, write_end, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE],
        )
        os.close(write_end)
        write_end = -1
        # Recorded before it is of use to anyone, so that one whose server dies here is adopted or replaced.
        ledger.record(_LEDGER_KIND, _LEDGER_NAME, pid=pid, start_time=_start_time(pid))
        line = await asyncio.to_thread(_first_line, ready, START_TIMEOUT_S)
    finally:
        for descriptor in (log, ready, write_end):
            if descriptor >= 0:
                os.close(descriptor)
    if line == b"ready\n":
        return
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
    status = os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])
    ledger.erase(_LEDGER_KIND, _LEDGER_NAME)
    reason = _said_since(log_path, log_start) or f"see {log_path}"
    if status == _EXIT_UNAVAILABLE:
        raise HostUnsupported(f"blockd cannot mount: {reason}", hint=_FUSE_HINT)
    raise OperationFailed(f"blockd did not start: {reason}")


def _recorded(ledger: Ledger) -> int | None:
    """Pid of the blockd in the ledger, if it runs."""
    for entry in ledger.entries(_LEDGER_KIND):
        pid, start_time = entry.details.get("pid"), entry.details.get("start_time")
        if isinstance(pid, int) and start_time is not None and _start_time(pid) == start_time:
            return pid
    return None


def _start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when the process has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _first_line(descriptor: int, timeout_s: float) -> bytes:
    """What comes through a pipe up to a line's end, its own end or the time limit."""
    line = b""
    while not line.endswith(b"\n") and select.select([descriptor], [], [], timeout_s)[0]:
        part = os.read(descriptor, 64)
        if not part:
            break
        line += part
    return line


async def _wait_for_end(pid: int, timeout_s: float | None) -> bool:
    """Whether the process ended in time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    with suppress(ChildProcessError):  # an adopted one is not our child
        os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222 (does not wait)
    return True


def _said_since(log_path: Path, offset: int) -> str:
    """The last line written to the log after `offset`."""
    with log_path.open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").splitlines()
    return lines[-1].removeprefix("blockd: ") if lines else ""
