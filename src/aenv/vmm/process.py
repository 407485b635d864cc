"""Processes that outlive this one: started apart, named for good by pid and start time, watched and ended
through a pidfd.

Nothing here knows what the process is. The caller owns each `Process` and calls `close` when done with it;
closing never ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import itertools
import os
import select
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_SYS_PIDFD_GETFD = 438
_ABOVE_TARGETS = 64
"""Descriptors are moved to at least this number before they are put at their places in a child, so that no
place is overwritten too early.
"""
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C"}

_libc = ctypes.CDLL(None, use_errno=True)


class Process:
    """A process, child or not. Made inside the event loop that watches it."""

    def __init__(self, pid: int, start_time: int | None = None) -> None:
        """Args: start_time: field 22 of /proc/PID/stat, to be sure that it is the process meant.

        Raises: ProcessLookupError when it has ended or is another one.
        """
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        try:
            # Read after the pidfd is held: from here on the pid can be no other process's unless this one has
            # ended.
            self.start_time = read_start_time(pid)
            if start_time is not None and (self.start_time != start_time or self._has_ended()):
                raise ProcessLookupError(f"process {pid} is not the one started at {start_time}")
        except BaseException:
            os.close(self._pidfd)
            raise
        self.outcome = "it ended"
        """How, once it has; known only of a child."""
        self._ended = asyncio.Event()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._on_end)

    @classmethod
    def of_child(cls, pid: int) -> Process:
        """A child just started. Raises: OSError when it cannot be watched; it has been ended then."""
        try:
            return cls(pid)
        except BaseException:
            os.kill(pid, signal.SIGKILL)  # it is not reaped yet, so the pid is still its own
            os.waitpid(pid, 0)
            raise

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    async def wait(self) -> None:
        """Return when the process has ended."""
        await self._ended.wait()

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.alive and not self._closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self, timeout_s: float) -> None:
        """Kill it and wait for its end, which disk requests in flight may delay. Raises: TimeoutError."""
        self.kill()
        async with asyncio.timeout(timeout_s):
            await self.wait()

    def borrow_descriptor(self, number: int) -> int:
        """A descriptor of our own for the process's descriptor `number`. The caller closes it. Raises:
        OSError.
        """
        descriptor = _libc.syscall(_SYS_PIDFD_GETFD, self._pidfd, number, 0)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {number} of process {self.pid}")
        os.set_inheritable(descriptor, False)
        return int(descriptor)

    def close(self) -> None:
        """Stop watching. Idempotent. Those in `wait` go on waiting; the process is not touched."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        with contextlib.suppress(
            ChildProcessError
        ):  # an adopted process is not our child, and how it ended not ours to know
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if result is not None:
                how = "status" if result.si_code == os.CLD_EXITED else "signal"
                self.outcome = f"it ended with {how} {result.si_status}"
        self._ended.set()

    def _has_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])


def read_start_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat, in clock ticks since the host's boot. Raises: ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise ProcessLookupError(f"process {pid} is gone") from error
    return int(stat.rpartition(")")[2].split()[19])


def processes_named(prefix: str) -> list[tuple[int, str]]:
    """(pid, name) of processes whose command line holds `-name NAME` with this prefix."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            for option, name in itertools.pairwise(arguments):
                if option == "-name" and name.startswith(prefix):
                    found.append((int(entry.name), name))
    return found


def spawn(command: list[str], descriptors: Mapping[int, int]) -> int:
    """Start `command` in a session of its own with exactly `descriptors` ({number in the child: ours}); gives its pid.

    Of standard input, output and error, those not given are /dev/null. Raises: OSError.
    """
    moved = {number: fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, _ABOVE_TARGETS) for number, ours in descriptors.items()}
    try:
        return os.posix_spawnp(
            command[0],
            command,
            _ENVIRONMENT,
            file_actions=[
                *((os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) for number in (0, 1, 2)),
                *((os.POSIX_SPAWN_DUP2, ours, number) for number, ours in moved.items()),
                *((os.POSIX_SPAWN_CLOSE, number) for number in _inheritable() - moved.keys()),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE],
        )
    finally:
        for ours in moved.values():
            os.close(ours)


def _inheritable() -> set[int]:
    """What a child would get unasked: descriptors that whoever started us left open."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one the directory was read by
            if number > 2 and os.get_inheritable(number):
                found.add(number)
    return found


def in_network_namespace(netns: Path, action: Callable[[], T]) -> T:
    """Run `action` in a thread that has entered `netns` and ends with it; a child it starts is born there.

    Blocks for as long as `action` runs, so that a cancelled caller can lose nothing. Raises: OSError, and
    what `action` raises.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        try:
            descriptor = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(descriptor, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter network namespace {netns}")
            finally:
                os.close(descriptor)
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = Thread(target=enter, name="in-netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
