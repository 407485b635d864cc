"""A VM under QEMU, and the successor that goes on in its place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from aenv.errors import AenvError, OperationFailed, SandboxLost
from aenv.vmm.contract import SavedVm, VmRecord, VmStats
from aenv.vmm.proc import open_memory, read_stats
from aenv.vmm.qemu.command import CONSOLE_BYTES
from aenv.vmm.qemu.machine import Machine

MAX_STATE_BYTES = 1 << 20
"""Far above what device set 1 saves (4–22 KiB), and as much as a pipe takes without a reader."""
_MIB = 1 << 20


class QemuVm:
    """See `aenv.vmm.contract.Vm`. Suspended means: vCPUs stopped and the tap queue detached."""

    def __init__(self, machine: Machine, record: VmRecord, *, running: bool) -> None:
        self._machine = machine
        self._record = record
        self._running = running
        self._state: bytes | None = None
        self._console = ""
        self.successor: QemuSuccessor | None = None

    @property
    def record(self) -> VmRecord:
        return self._record

    async def suspend(self) -> None:
        if not self._running:
            return
        if self.successor is not None:
            # Packets from here on wait in the successor's queue. Taking a queue off the tap drops what QEMU has not
            # read from it, so QEMU is asked something first: when it answers it has read what was there. What arrives
            # in the microseconds between may be lost, as on any network.
            self.successor.attach_queue(True)
            await self._machine.execute("query-status")
        self._machine.attach_queue(False)
        await self._machine.execute("stop")
        self._running = False

    async def save(self) -> SavedVm:
        if self._running:
            raise OperationFailed(f"the VM of {self._record.vm_id} runs; suspend it before saving")
        if self._state is None:
            self._state = await self._save_devices()
        details = self._record.details
        memory = open_memory(self._record.pid, details["memory_inode"], details["memory_mib"] * _MIB)
        return SavedVm(self._state, memory)

    async def resume(self) -> None:
        if self._running:
            return
        self._machine.attach_queue(True)
        if self.successor is not None:
            self.successor.attach_queue(False)
        await self._machine.execute("cont")
        self._running = True
        self._state = None

    def promote(self) -> None:
        self._machine.promote(self._record.manifest["vcpus"])

    async def stop(self) -> None:
        await self._machine.end()

    async def detach(self) -> None:
        await self._machine.release()

    async def wait(self) -> str:
        await self._machine.process.wait()
        return self._machine.obituary()

    async def console(self) -> str:
        # Reading empties QEMU's ring, so what was read is kept.
        with contextlib.suppress(AenvError):
            self._console += await self._machine.execute("ringbuf-read", device="console", size=CONSOLE_BYTES)
            self._console = self._console[-CONSOLE_BYTES:]
        return self._console

    def stats(self) -> VmStats:
        return read_stats(self._record.pid)

    async def _save_devices(self) -> bytes:
        """Device state without memory. Not `live`, which closes the disks and makes QEMU abort at the next save."""
        file = self._machine.place.state_file
        try:
            await self._machine.execute("xen-save-devices-state", filename=str(file), live=False)
            return _read_state(file)
        except OSError as error:
            raise OperationFailed(f"the saved state of {self._record.vm_id} cannot be read: {error}") from error
        finally:
            self._machine.place.remove_state()


class QemuSuccessor:
    """See `aenv.vmm.contract.Successor`. Should the server die, the pipe's end does, and with it the waiting
    process.
    """

    def __init__(self, machine: Machine, record: VmRecord, predecessor: QemuVm, state_pipe: int) -> None:
        self._machine = machine
        self._record = record
        self._predecessor = predecessor
        self._state_pipe = state_pipe
        self._waiting = True

    @property
    def record(self) -> VmRecord:
        return self._record

    def attach_queue(self, attached: bool) -> None:
        """With a waiting process that has died nothing is attached; `take_over` will say so."""
        try:
            self._machine.attach_queue(attached)
        except SandboxLost:
            return

    async def take_over(self, state: bytes) -> QemuVm:
        vm = QemuVm(self._machine, self._record, running=False)
        try:
            self.attach_queue(True)
            send_state(self._state_pipe, state)
            self._forget()
            await self._machine.loaded()
        except BaseException as error:
            await self.discard()
            if isinstance(error, SandboxLost | OSError):
                raise OperationFailed(f"the successor of {self._record.vm_id} is gone: {error}") from error
            raise
        try:
            await vm.resume()
        except BaseException as error:
            # It may have run and written to the disk: the predecessor's memory no longer fits that.
            await self._machine.end()
            if isinstance(error, AenvError):
                raise SandboxLost(f"the successor of {self._record.vm_id} failed at its first step: {error}") from error
            raise
        return vm

    async def discard(self) -> None:
        self._forget()
        await self._machine.end()

    def _forget(self) -> None:
        if self._waiting:
            self._waiting = False
            os.close(self._state_pipe)
            self._predecessor.successor = None


def send_state(pipe: int, state: bytes) -> None:
    """Put the whole state into a pipe made with `state_pipe`, which has room for it. Raises: OSError when its
    reader is gone.
    """
    if os.write(pipe, state) != len(state):
        raise OSError("the pipe took a part of the state")


def state_pipe() -> tuple[int, int]:
    """(reading, writing) end of a pipe that holds a whole state."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(writer, False)
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, MAX_STATE_BYTES)
    except BaseException:
        os.close(reader)
        os.close(writer)
        raise
    return reader, writer


def _read_state(file: Path) -> bytes:
    """Read what the VM's process wrote. The directory is that process's own, so nothing about the file is
    taken for granted.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= MAX_STATE_BYTES:
            raise OperationFailed(f"QEMU's saved state {file.name} is no file of 1 to {MAX_STATE_BYTES} bytes")
        return os.read(descriptor, MAX_STATE_BYTES)
    finally:
        os.close(descriptor)
