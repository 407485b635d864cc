"""The QEMU driver: starts, restores and adopts VMs, and says which saved states fit this host."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from aenv.errors import CorruptData, IncompatibleSnapshot, InvalidRequest, OperationFailed, SandboxLost
from aenv.settings import Settings
from aenv.vmm.cgroup import ControlGroups, Limits
from aenv.vmm.contract import (
    DEVICE_SET,
    MAX_DISKS,
    BootSource,
    CaptureKind,
    Manifest,
    VmRecord,
    VmSpec,
)
from aenv.vmm.contract import Vm as AnyVm
from aenv.vmm.process import Process, processes_named
from aenv.vmm.qemu import command
from aenv.vmm.qemu.machine import END_TIMEOUT_S, Machine, Place
from aenv.vmm.qemu.probe import Host, probe
from aenv.vmm.qemu.vm import MAX_STATE_BYTES, QemuSuccessor, QemuVm, send_state, state_pipe

_VMM = "qemu"
_MACHINE = "microvm"
_MIB = 1 << 20
_TSC_TOLERANCE = 250e-6
"""Relative. What a guest's clock may run fast or slow without its time synchronisation giving up; equal hosts
differ by ten parts in a million.
"""


class QemuDriver:
    """See `aenv.vmm.contract.Driver`. Capture is by succession."""

    capture_kind = CaptureKind.SUCCESSION

    def __init__(self, host: Host, instance_id: str, groups: ControlGroups) -> None:
        self.host = host
        self._prefix = f"aenv-{instance_id}-"
        self._groups = groups

    @classmethod
    async def create(cls, settings: Settings, instance_id: str) -> QemuDriver:
        """Probe the host and make a driver for it. `driver.host` says what was chosen and why.

        Args:
            instance_id: marks processes and control groups as this node's.

        Raises: HostUnsupported.
        """
        return cls(await probe(settings.accelerator), instance_id, ControlGroups(instance_id))

    @property
    def warnings(self) -> list[str]:
        """What this host lacks without stopping the driver, for people."""
        return [*self.host.warnings, *self._groups.problems]

    async def boot(self, spec: VmSpec, source: BootSource) -> QemuVm:
        """See the contract. A start that fails is tried once more: an emulator on a busy host does not always
        come up.
        """
        manifest = self._manifest(spec, source.key)
        with contextlib.ExitStack() as files:
            try:
                kernel = files.enter_context(source.kernel.open("rb")).fileno()
                initramfs = files.enter_context(source.initramfs.open("rb")).fileno()
            except OSError as error:
                raise OperationFailed(f"no kernel or initramfs to boot {spec.vm_id}: {error}") from error
            inputs = {command.KERNEL_FD: kernel, command.INITRAMFS_FD: initramfs}
            try:
                machine, record = await self._launch(spec, manifest, inputs, source)
            except OperationFailed:
                machine, record = await self._launch(spec, manifest, inputs, source)
        return await _started(QemuVm(machine, record, running=False))

    async def restore(self, spec: VmSpec, state: bytes, manifest: Manifest, *, run: bool = True) -> QemuVm:
        self.check(manifest)
        ours = self._manifest(spec, manifest.kernel)
        _require_equal(manifest, ours, ("vcpus", "memory_mib", "disks"))
        if not 0 < len(state) <= MAX_STATE_BYTES:
            size = f"{len(state)} bytes; 1 to {MAX_STATE_BYTES} are possible"
            raise CorruptData(f"the saved state for {spec.vm_id} has {size}")
        reader, writer = state_pipe()
        try:
            send_state(writer, state)
            os.close(writer)
            writer = -1
            machine, record = await self._launch(spec, ours, {command.STATE_FD: reader})
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        try:
            await machine.loaded()
        except BaseException:
            await machine.end()
            raise
        vm = QemuVm(machine, record, running=False)
        return await _started(vm) if run else vm

    async def prepare_successor(self, predecessor: AnyVm, spec: VmSpec) -> QemuSuccessor:
        if not isinstance(predecessor, QemuVm):
            raise OperationFailed(f"the VM of {spec.vm_id} is not this driver's")
        if predecessor.successor is not None:
            raise OperationFailed(f"the VM of {spec.vm_id} already has a successor waiting")
        theirs = Manifest.from_json(predecessor.record.manifest)
        manifest = self._manifest(spec, theirs.kernel)
        _require_equal(theirs, manifest, ("vcpus", "memory_mib", "disks"))
        reader, writer = state_pipe()
        try:
            machine, record = await self._launch(spec, manifest, {command.STATE_FD: reader})
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        successor = QemuSuccessor(machine, record, predecessor, writer)
        predecessor.successor = successor
        return successor

    async def adopt(self, record: VmRecord) -> QemuVm:
        try:
            place = Place(Path(record.workdir), record.details["token"])
        except KeyError as error:
            raise SandboxLost(f"the record of {record.vm_id} names no QEMU process") from error
        group = self._groups.named(self._group_name(record.vm_id, place))
        machine = await Machine.find(record.vm_id, place, record.pid, record.start_time, group)
        try:
            status = await machine.execute("query-status")
            if status["status"] == "inmigrate":
                raise SandboxLost(f"the VM of {record.vm_id} never had its whole state")
        except BaseException:
            await machine.end()
            raise
        return QemuVm(machine, record, running=bool(status["running"]))

    def check(self, manifest: Manifest) -> None:
        host = self.host
        _require("VMM", manifest.vmm, _VMM)
        _require("QEMU series", _series(manifest.vmm_version), _series(host.version))
        _require("accelerator", manifest.accelerator, str(host.platform.accelerator))
        _require("machine", manifest.machine, _MACHINE)
        _require("device set", manifest.device_set, DEVICE_SET)
        _require("CPU model", manifest.cpu_model, host.cpu_model)
        _require("architecture", manifest.architecture, os.uname().machine)
        if abs(manifest.tsc_khz - host.platform.tsc_khz) > host.platform.tsc_khz * _TSC_TOLERANCE:
            raise _refusal("clock rate", f"{manifest.tsc_khz} kHz", f"{host.platform.tsc_khz} kHz")

    async def sweep(self, keep: Collection[VmRecord]) -> list[str]:
        """See the contract. Control groups that hold no process any more go too."""
        kept = {record.pid for record in keep}
        ended = []
        for pid, name in processes_named(self._prefix):
            if pid in kept:
                continue
            with contextlib.suppress(ProcessLookupError):
                process = Process(pid)
                try:
                    await process.end(END_TIMEOUT_S)
                finally:
                    process.close()
                ended.append(f"process {pid} ({name})")
        self._groups.remove_empty()
        return ended

    async def _launch(
        self, spec: VmSpec, manifest: Manifest, inputs: Mapping[int, int], source: BootSource | None = None
    ) -> tuple[Machine, VmRecord]:
        place = Place.new(spec.workdir)
        memory = await asyncio.to_thread(_stat_memory, spec)
        arguments = command.arguments(self.host.platform, self._prefix + spec.vm_id, spec, source)
        confinement = spec.confinement
        arguments = command.confined(arguments, confinement.uid, confinement.gid, self.host.groups)
        memory_mib = confinement.memory_mib + command.OVERHEAD_MIB
        limits = Limits(memory_mib, confinement.pids, spec.vcpus, confinement.background)
        group = self._groups.create(self._group_name(spec.vm_id, place), limits)
        machine = await Machine.launch(spec, place, arguments, group, inputs)
        record = VmRecord(
            vm_id=spec.vm_id,
            pid=machine.process.pid,
            start_time=machine.process.start_time,
            workdir=str(spec.workdir),
            manifest=manifest.to_json(),
            details={"token": place.token, "memory_inode": memory.st_ino, "memory_mib": spec.memory_mib},
        )
        return machine, record

    def _group_name(self, vm_id: str, place: Place) -> str:
        return f"{vm_id}-{place.token}"

    def _manifest(self, spec: VmSpec, kernel: str) -> Manifest:
        if len(spec.disks) > MAX_DISKS:
            raise InvalidRequest(f"{len(spec.disks)} disks; at most {MAX_DISKS} are possible")
        return Manifest(
            vmm=_VMM,
            vmm_version=self.host.version,
            accelerator=str(self.host.platform.accelerator),
            machine=_MACHINE,
            device_set=DEVICE_SET,
            cpu_model=self.host.cpu_model,
            architecture=os.uname().machine,
            tsc_khz=self.host.platform.tsc_khz,
            vcpus=spec.vcpus,
            memory_mib=spec.memory_mib,
            disks=len(spec.disks),
            kernel=kernel,
        )


async def _started(vm: QemuVm) -> QemuVm:
    try:
        await vm.resume()
    except BaseException:
        await vm.stop()
        raise
    return vm


def _stat_memory(spec: VmSpec) -> os.stat_result:
    """Raises: OperationFailed when the image is not there or has another size; QEMU would make it fit."""
    try:
        status = spec.memory.stat()
    except OSError as error:
        raise OperationFailed(f"no memory image for {spec.vm_id}: {error}") from error
    if status.st_size != spec.memory_mib * _MIB:
        raise OperationFailed(
            f"the memory image for {spec.vm_id} has {status.st_size} bytes, not {spec.memory_mib} MiB"
        )
    return status


def _series(version: str) -> str:
    """Major and minor: releases of one series read each other's states."""
    return ".".join(version.split(".")[:2])


def _require_equal(theirs: Manifest, ours: Manifest, fields: Sequence[str]) -> None:
    for name in fields:
        _require(name, asdict(theirs)[name], asdict(ours)[name])


def _require(name: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise _refusal(name, theirs, ours)


def _refusal(name: str, theirs: object, ours: object) -> IncompatibleSnapshot:
    return IncompatibleSnapshot(
        f"the snapshot's {name} is {theirs}, here it is {ours}",
        hint="restore it on a host like the one it was made on, or build it anew here",
    )
