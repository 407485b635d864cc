"""One QEMU process with its monitor, control group, log and tap queue: what running VMs and waiting
successors are made of.

A `Machine` owns all of it. `end` frees everything; `release` lets go of a process that is to run on. No
method retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aenv.errors import CorruptData, OperationFailed, SandboxLost
from aenv.vmm import tap
from aenv.vmm.cgroup import ControlGroup
from aenv.vmm.contract import VmSpec
from aenv.vmm.process import Process, in_network_namespace, spawn
from aenv.vmm.qemu import command
from aenv.vmm.qemu.monitor import Monitor, MonitorLostError

T = TypeVar("T")

COMMAND_TIMEOUT_S = 60.0
"""Of one monitor command. `stop` writes out what the disk has not flushed, which takes seconds on a slow one.
"""
START_TIMEOUT_S = 30.0
"""From the spawn to a monitor that answers; 50 ms where nothing else wants the CPU."""
LOAD_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0
"""From SIGKILL to the process's end, which waits for disk requests in flight."""
_TAIL_BYTES = 4096
_LOAD_FAILURES = (
    "load of migration failed",
    "error while loading state",
    "Unknown savevm section",
    "Not a migration stream",
)


@dataclass(frozen=True)
class Place:
    """Names of a machine that another server process needs to find it again."""

    workdir: Path
    token: str
    """Unique to the process: successor and predecessor may share a directory."""

    @classmethod
    def new(cls, workdir: Path) -> Place:
        return cls(workdir, secrets.token_hex(4))

    @property
    def socket_name(self) -> str:
        return f"qmp-{self.token}"

    @property
    def state_file(self) -> Path:
        return self.workdir / f"state-{self.token}"

    # The directory is the VM's own user's, who may have put anything in their places; it goes with the directory.

    def remove_socket(self) -> None:
        with contextlib.suppress(OSError):
            (self.workdir / self.socket_name).unlink()

    def remove_state(self) -> None:
        with contextlib.suppress(OSError):
            self.state_file.unlink()


class Machine:
    def __init__(
        self,
        vm_id: str,
        place: Place,
        *,
        process: Process,
        monitor: Monitor,
        group: ControlGroup,
        log: int,
    ) -> None:
        self.vm_id = vm_id
        self.place = place
        self.process = process
        self._monitor = monitor
        self._group = group
        self._log = log
        self._tail = b""
        self._open = True

    @classmethod
    async def launch(
        cls, spec: VmSpec, place: Place, arguments: list[str], group: ControlGroup, inputs: Mapping[int, int]
    ) -> Machine:
        """Start QEMU in the namespace of `spec.network`, with a detached queue of its tap. Returns once the
        monitor answers.

        Args:
            arguments: the whole command, which expects the descriptors of command.py.
            group: is the machine's from here on, also when this fails.
            inputs: {number in QEMU: ours} of the descriptors the command reads from; ours stay the caller's.

        Raises: OperationFailed, or CorruptData when it has found the state to be none; nothing is left.
        """
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(group.remove)
            try:
                listener = _listen(spec, place)
                undo.callback(place.remove_socket)
                with listener:
                    log, log_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                    undo.callback(os.close, log)
                    try:
                        pid = _spawn(spec, arguments, listener.fileno(), log_writer, inputs)
                    finally:
                        os.close(log_writer)
                    process = Process.of_child(pid)
                    undo.push_async_callback(_kill, process)
                    # The kernel may take 10 ms for it, in which QEMU starts and others need the event loop.
                    await asyncio.to_thread(group.add, pid)
                    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
                    connection = _connect(place)
            except OSError as error:
                raise OperationFailed(f"cannot start a VM for {spec.vm_id}: {error}") from error
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    monitor = await Monitor.connect(connection)
            except (MonitorLostError, TimeoutError) as error:
                # The state may have been refused before there was anybody to tell.
                tail = _read_log(log)
                _raise_if_refused(spec.vm_id, tail, error)
                outcome = "it runs" if process.alive else process.outcome
                reason = f"{error!r}; {outcome}; its log: {tail or '(empty)'}"
                raise OperationFailed(f"QEMU did not start for {spec.vm_id}: {reason}") from error
            undo.pop_all()
        return cls(spec.vm_id, place, process=process, monitor=monitor, group=group, log=log)

    @classmethod
    async def find(cls, vm_id: str, place: Place, pid: int, start_time: int, group: ControlGroup) -> Machine:
        """The machine another server process started. Raises: SandboxLost; a process that is the right one is
        ended then.
        """
        try:
            process = Process(pid, start_time)
        except ProcessLookupError as error:
            raise SandboxLost(f"the VM of {vm_id} is gone: {error}") from error
        async with contextlib.AsyncExitStack() as undo:
            undo.callback(group.remove)
            undo.callback(place.remove_socket)
            undo.push_async_callback(_kill, process)
            try:
                # Opening the pipe by name gives a reading end of our own: log lines written since the old
                # server died are still in it.
                log = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                undo.callback(os.close, log)
                async with asyncio.timeout(START_TIMEOUT_S):
                    monitor = await Monitor.connect(_connect(place))
            except (OSError, MonitorLostError, TimeoutError) as error:
                raise SandboxLost(f"the VM of {vm_id} runs but cannot be reached: {error!r}") from error
            undo.pop_all()
        return cls(vm_id, place, process=process, monitor=monitor, group=group, log=log)

    async def execute(self, name: str, **arguments: object) -> Any:
        """One monitor command. Raises: OperationFailed when QEMU refuses it; SandboxLost when QEMU is gone,
        or hangs and has been killed.
        """
        return await self._answer(self._monitor.execute(name, arguments or None), name, COMMAND_TIMEOUT_S)

    async def loaded(self) -> None:
        """Return when the incoming state is in. Raises: CorruptData when QEMU refused it, OperationFailed
        otherwise; the machine is to be ended then.
        """
        loading = asyncio.ensure_future(self._answer(self._monitor.loaded(), "the load", LOAD_TIMEOUT_S))
        ending = asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait((loading, ending), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                return loading.result()
            raise SandboxLost("QEMU ended while loading")
        except SandboxLost as error:
            tail = self.log_tail()
            _raise_if_refused(self.vm_id, tail, error)
            raise OperationFailed(f"the state of {self.vm_id} was not loaded: {error}; {tail}") from error
        finally:
            for task in (loading, ending):
                task.cancel()
            await asyncio.gather(loading, ending, return_exceptions=True)

    def attach_queue(self, attached: bool) -> None:
        """Put the machine on its tap, or take it off. Idempotent. Raises: SandboxLost."""
        try:
            # QEMU's own descriptor, not a copy kept here: a copy would keep the queue in being after QEMU,
            # and an adopter has none.
            queue = self.process.borrow_descriptor(command.QUEUE_FD)
            try:
                tap.set_attached(queue, attached)
            finally:
                os.close(queue)
        except OSError as error:
            raise SandboxLost(f"the VM of {self.vm_id} is gone: {error}; {self.log_tail()}") from error

    def promote(self, vcpus: int) -> None:
        """Out of the background."""
        self._group.promote(vcpus)

    def obituary(self) -> str:
        """How the process ended as far as is known, with the tail of its log."""
        cause = (
            "it was over the memory limit of its control group"
            if self._group.ran_out_of_memory
            else self.process.outcome
        )
        return f"{cause}; its log: {self.log_tail() or '(empty)'}"

    def log_tail(self) -> str:
        """The last of what QEMU wrote to its error output."""
        if self._open:
            self._tail = (self._tail + _read_log_bytes(self._log))[-_TAIL_BYTES:]
        return _text(self._tail)

    async def end(self) -> None:
        """Kill the process, wait for its end and free everything. Idempotent. Raises: OperationFailed when
        the process does not end; call again then.
        """
        await self._kill()
        await self.release()
        self._group.remove()
        self.place.remove_socket()
        self.place.remove_state()

    async def release(self) -> None:
        """Let go of a process that runs on, for another server process to find. Idempotent."""
        if self._open:
            self.log_tail()
            self._open = False
            self.process.close()
            os.close(self._log)
            await self._monitor.close()

    async def _answer(self, reply: Awaitable[T], name: str, timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except MonitorLostError as error:
            # As a rule the process has ended; one that cannot be told anything any more is ended.
            await self._kill()
            raise SandboxLost(f"the VM of {self.vm_id} is gone: {self.obituary()}") from error
        except TimeoutError as error:
            await self._kill()
            raise SandboxLost(
                f"the VM of {self.vm_id} did not answer {name} in {timeout_s:.0f} s: {self.log_tail()}"
            ) from error

    async def _kill(self) -> None:
        """Raises: OperationFailed when the process does not end."""
        if not self._open:
            return
        try:
            await self.process.end(END_TIMEOUT_S)
        except TimeoutError as error:
            raise OperationFailed(f"process {self.process.pid} of {self.vm_id} does not end after SIGKILL") from error


def _spawn(spec: VmSpec, arguments: list[str], listener: int, log: int, inputs: Mapping[int, int]) -> int:
    def start() -> int:
        queue = tap.open_queue(spec.network.tap)
        try:
            own = {1: log, 2: log, command.MONITOR_FD: listener, command.QUEUE_FD: queue}
            return spawn(arguments, {**own, **inputs})
        finally:
            os.close(queue)

    return in_network_namespace(spec.network.netns, start)


async def _kill(process: Process) -> None:
    with contextlib.suppress(TimeoutError):
        await process.end(END_TIMEOUT_S)
    process.close()


def _listen(spec: VmSpec, place: Place) -> socket.socket:
    """A listening socket for QEMU, made by us: a client can connect from now on and is answered once QEMU
    runs, without a poll.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(place) as path:
            listener.bind(path)
            os.chmod(path, 0o600)
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def _connect(place: Place) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with _short_path(place) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short_path(place: Place) -> Iterator[str]:
    """The socket by way of its directory's descriptor: a socket's address holds 107 bytes, a directory's path
    may be longer.
    """
    directory = os.open(place.workdir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{place.socket_name}"
    finally:
        os.close(directory)


def _read_log(log: int) -> str:
    return _text(_read_log_bytes(log)[-_TAIL_BYTES:])


def _read_log_bytes(log: int) -> bytes:
    """All that is in the pipe. It holds 64 KiB; what QEMU writes beyond is lost, so a guest that provokes
    messages fills no disk.
    """
    content = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(log, 65536):
            content += part
    return content


def _raise_if_refused(vm_id: str, log: str, cause: Exception) -> None:
    """Raises: CorruptData when the log says that QEMU could not read the state it was given."""
    if any(text in log for text in _LOAD_FAILURES):
        raise CorruptData(f"QEMU refused the saved state of {vm_id}: {log}") from cause


def _text(content: bytes) -> str:
    return content.decode(errors="replace").strip()
