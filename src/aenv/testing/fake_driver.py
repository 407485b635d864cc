"""The VMM contract on the fake VMM, spoken through nothing but its API. Captures by tracking, as Firecracker does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aenv.errors import CorruptData, IncompatibleSnapshot, OperationFailed, SandboxLost
from aenv.testing.fake_vmm import CORRUPT, PAGE, ApiError, FakeHost, FakeVmm
from aenv.vmm.contract import (
    DEVICE_SET,
    BootSource,
    CaptureKind,
    Manifest,
    NetworkAttachment,
    SavedVm,
    SparseDiff,
    Successor,
    Vm,
    VmRecord,
    VmSpec,
    VmStats,
)

_MIB = 1 << 20


class FakeVm:
    """See `aenv.vmm.contract.Vm`."""

    def __init__(self, process: FakeVmm, host: FakeHost, record: VmRecord, request_timeout_s: float) -> None:
        self.process = process
        self._host = host
        self._record = record
        self._request_timeout_s = request_timeout_s

    @property
    def record(self) -> VmRecord:
        return self._record

    async def load(self, spec: VmSpec, state: bytes) -> None:
        """Take on a saved state; the VM is stopped then. Raises: CorruptData, OperationFailed, SandboxLost."""
        file = self._file("state")
        file.write_bytes(state)
        try:
            await self.request(
                "PUT",
                "/snapshot/load",
                snapshot_path=str(file),
                mem_backend={"backend_type": "File", "backend_path": str(spec.memory)},
                track_dirty_pages=True,
                network_overrides=_network(spec.network),
                drive_overrides=[str(disk) for disk in spec.disks],
            )
        except OperationFailed as error:
            if CORRUPT in error.message:
                raise CorruptData(f"the saved state for {spec.vm_id} was refused: {error.message}") from error
            raise
        finally:
            file.unlink()

    async def suspend(self) -> None:
        await self.request("PATCH", "/vm", state="Paused")

    async def save(self) -> SavedVm:
        state, diff = self._file("state"), self._file("diff")
        try:
            await self.request(
                "PUT", "/snapshot/create", snapshot_type="Diff", snapshot_path=str(state), mem_file_path=str(diff)
            )
            return SavedVm(state.read_bytes(), SparseDiff(diff))
        finally:
            state.unlink(missing_ok=True)

    async def resume(self) -> None:
        await self.request("PATCH", "/vm", state="Resumed")

    async def stop(self) -> None:
        self._host.kill(self._record.pid)
        self._file("diff").unlink(missing_ok=True)

    def promote(self) -> None:
        pass  # it takes no CPU time that others could want

    async def detach(self) -> None:
        pass  # nothing is held outside the host

    async def wait(self) -> str:
        await self.process.ended.wait()
        return f"the VMM ended with {self.process.outcome}"

    async def console(self) -> str:
        return "fake guest ready\n" if self.process.outcome is None else ""

    def stats(self) -> VmStats:
        if self.process.guest is None or self.process.outcome is not None:
            raise SandboxLost(f"the VM of {self._record.vm_id} is gone")
        private = self.process.guest.private_pages * PAGE
        return VmStats(cpu_s=0.0, resident_bytes=private, private_bytes=private)

    async def request(self, method: str, path: str, **body: Any) -> None:
        """Raises: OperationFailed when refused; SandboxLost when the VMM is gone, or hangs and has been
        killed.
        """
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self.process.request(method, path, body)
        except ApiError as error:
            raise OperationFailed(f"{method} {path} of {self._record.vm_id} was refused: {error}") from error
        except ConnectionError as error:
            raise SandboxLost(f"the VM of {self._record.vm_id} is gone: {error}") from error
        except TimeoutError as error:
            self._host.kill(self._record.pid)
            raise SandboxLost(f"the VM of {self._record.vm_id} did not answer {method} {path}") from error

    def _file(self, name: str) -> Path:
        return Path(self._record.workdir, name)


class FakeDriver:
    """See `aenv.vmm.contract.Driver`.

    Args:
        request_timeout_s: after which a hanging VMM is given up; short, for tests.
    """

    capture_kind = CaptureKind.TRACKING
    vm_type: type[FakeVm] = FakeVm

    def __init__(self, host: FakeHost, *, cpu_model: str = "fake", request_timeout_s: float = 0.2) -> None:
        self.host = host
        self._cpu_model = cpu_model
        self._request_timeout_s = request_timeout_s

    @property
    def warnings(self) -> list[str]:
        return []

    async def boot(self, spec: VmSpec, source: BootSource) -> Vm:
        vm = self.spawn(spec, source.key)
        async with undone_on_failure(vm):
            await vm.request(
                "PUT",
                "/machine-config",
                vcpu_count=spec.vcpus,
                mem_size_mib=spec.memory_mib,
                track_dirty_pages=True,
            )
            await vm.request("PUT", "/boot-source", kernel_image_path=str(source.kernel), boot_args=source.command_line)
            for disk in spec.disks:
                await vm.request("PUT", "/drives", path_on_host=str(disk))
            await vm.request("PUT", "/network-interfaces", **_network(spec.network))
            await vm.request("PUT", "/actions", action_type="InstanceStart")
        return vm

    async def restore(self, spec: VmSpec, state: bytes, manifest: Manifest, *, run: bool = True) -> Vm:
        self.check(manifest)
        ours = self._manifest(spec.vcpus, spec.memory_mib, len(spec.disks), manifest.kernel)
        _require_equal(manifest, ours)
        vm = self.spawn(spec, manifest.kernel)
        async with undone_on_failure(vm):
            await vm.load(spec, state)
            if run:
                await vm.resume()
        return vm

    async def prepare_successor(self, predecessor: Vm, spec: VmSpec) -> Successor:
        raise OperationFailed(f"the VM of {spec.vm_id} goes on in place; it needs no successor")

    async def adopt(self, record: VmRecord) -> Vm:
        process = self.host.processes.get(record.pid)
        if process is None or process.start_time != record.start_time:
            raise SandboxLost(f"the VM of {record.vm_id} is gone")
        return self.vm_type(process, self.host, record, self._request_timeout_s)

    async def sweep(self, keep: Collection[VmRecord]) -> list[str]:
        kept = {record.pid for record in keep}
        unknown = [process for process in self.host.processes.values() if process.pid not in kept]
        for process in unknown:
            self.host.kill(process.pid)
        return [f"process {process.pid} ({process.vm_id})" for process in unknown]

    def check(self, manifest: Manifest) -> None:
        ours = self._manifest(manifest.vcpus, manifest.memory_mib, manifest.disks, manifest.kernel)
        _require_equal(manifest, ours)

    def spawn(self, spec: VmSpec, kernel: str) -> FakeVm:
        """A process that is not configured yet."""
        if not spec.memory.exists() or spec.memory.stat().st_size != spec.memory_mib * _MIB:
            raise OperationFailed(f"the memory image for {spec.vm_id} is not there or not {spec.memory_mib} MiB")
        process = self.host.spawn(spec.vm_id)
        record = VmRecord(
            vm_id=spec.vm_id,
            pid=process.pid,
            start_time=process.start_time,
            workdir=str(spec.workdir),
            manifest=self._manifest(spec.vcpus, spec.memory_mib, len(spec.disks), kernel).to_json(),
        )
        return self.vm_type(process, self.host, record, self._request_timeout_s)

    def _manifest(self, vcpus: int, memory_mib: int, disks: int, kernel: str) -> Manifest:
        return Manifest(
            vmm="fake",
            vmm_version="1.0",
            accelerator="none",
            machine="fake",
            device_set=DEVICE_SET,
            cpu_model=self._cpu_model,
            architecture="x86_64",
            tsc_khz=1_000_000,
            vcpus=vcpus,
            memory_mib=memory_mib,
            disks=disks,
            kernel=kernel,
        )


@asynccontextmanager
async def undone_on_failure(vm: FakeVm) -> AsyncIterator[None]:
    """A VM that cannot be brought up is ended, and never was one to be lost."""
    try:
        yield
    except SandboxLost as error:
        await vm.stop()
        raise OperationFailed(f"the VM of {vm.record.vm_id} did not start: {error.message}") from error
    except BaseException:
        await vm.stop()
        raise


def _network(network: NetworkAttachment) -> dict[str, str]:
    return {"netns": str(network.netns), "host_dev_name": network.tap, "guest_mac": network.mac}


def _require_equal(theirs: Manifest, ours: Manifest) -> None:
    for name, value in theirs.to_json().items():
        if value != ours.to_json()[name]:
            raise IncompatibleSnapshot(f"the snapshot's {name} is {value}, here it is {ours.to_json()[name]}")
