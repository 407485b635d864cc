"""The VMM contract on the fake VMM, capturing by succession, as QEMU does: dirty are the pages private to the process,
and what goes on after a capture goes on in another process.
"""

from __future__ import annotations

from aenv.errors import AenvError, OperationFailed, SandboxLost
from aenv.testing.fake_driver import FakeDriver, FakeVm
from aenv.vmm.contract import (
    CaptureKind,
    Manifest,
    MemoryRange,
    ProcessMemory,
    SavedVm,
    Successor,
    Vm,
    VmRecord,
    VmSpec,
)


class FakeSuccessionVm(FakeVm):
    """See `aenv.vmm.contract.Vm`."""

    async def save(self) -> SavedVm:
        state = self._file("state")
        try:
            await self.request("PUT", "/snapshot/create", snapshot_type="State", snapshot_path=str(state))
            guest = self.process.guest
            assert guest is not None
            memory, pagemap = guest.memory_files()
            return SavedVm(state.read_bytes(), ProcessMemory(memory, pagemap, [MemoryRange(0, 0, guest.size)]))
        finally:
            state.unlink(missing_ok=True)


class FakeSuccessor:
    """See `aenv.vmm.contract.Successor`."""

    def __init__(self, vm: FakeVm, spec: VmSpec) -> None:
        self._vm = vm
        self._spec = spec

    @property
    def record(self) -> VmRecord:
        return self._vm.record

    async def take_over(self, state: bytes) -> Vm:
        try:
            await self._vm.load(self._spec, state)
        except SandboxLost as error:
            raise OperationFailed(f"the successor of {self._spec.vm_id} ended: {error.message}") from error
        except AenvError:
            await self._vm.stop()
            raise
        try:
            await self._vm.resume()
        except AenvError as error:
            await self._vm.stop()
            raise SandboxLost(f"the successor {self._spec.vm_id} may have run: {error.message}") from error
        return self._vm

    async def discard(self) -> None:
        await self._vm.stop()


class FakeSuccessionDriver(FakeDriver):
    """See `aenv.vmm.contract.Driver`."""

    capture_kind = CaptureKind.SUCCESSION
    vm_type = FakeSuccessionVm

    async def prepare_successor(self, predecessor: Vm, spec: VmSpec) -> Successor:
        kernel = Manifest.from_json(predecessor.record.manifest).kernel
        return FakeSuccessor(self.spawn(spec, kernel), spec)

    async def adopt(self, record: VmRecord) -> Vm:
        process = self.host.processes.get(record.pid)
        if process is not None and process.guest is None:
            raise SandboxLost(f"the VM {record.vm_id} never took over")
        return await super().adopt(record)
