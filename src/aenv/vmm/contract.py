"""The contract between the node and a virtual machine monitor.

A driver boots, captures, restores and adopts VM processes. It knows paths, descriptors and numbers; it knows
nothing of layers, slots or guests. Two kinds of capture exist, and a driver says which it does:

* `SUCCESSION`: dirty pages are those private to the process since it mapped its memory image. Whoever wants
  the VM to go on after a capture starts a *successor* beforehand on the (pending) new image and lets it take
  over. Resuming in place is for rolling back.
* `TRACKING`: the VMM logs dirty pages itself and writes them to a sparse file while saving; the same process
  goes on.

Every call is event-driven and bounded by a deadline of the driver's. Errors: `OperationFailed` when the VM is
as before, `SandboxLost` when its process is gone or its state cannot be trusted, `HostUnsupported` for what
the host lacks, `IncompatibleSnapshot` for a manifest that does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

DEVICE_SET = 1
"""Version of the fixed device set, part of every snapshot: serial console, rng, balloon with free page
reporting, one network card, virtio disks in order.
"""
MAX_DISKS = 8


class CaptureKind(StrEnum):
    SUCCESSION = "succession"
    TRACKING = "tracking"


@dataclass(frozen=True)
class Manifest:
    """What a saved state needs of the host it is restored on. Equal ones fit; a driver may accept more."""

    vmm: str
    vmm_version: str
    accelerator: str
    machine: str
    device_set: int
    cpu_model: str
    architecture: str
    tsc_khz: int
    vcpus: int
    memory_mib: int
    disks: int
    kernel: str
    """Content key of kernel and initramfs."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Raises: CorruptData is the caller's to raise; this raises TypeError for missing or unknown keys."""
        return cls(**data)


@dataclass(frozen=True)
class NetworkAttachment:
    """A multi-queue tap that exists inside a network namespace."""

    netns: Path
    tap: str
    mac: str


@dataclass(frozen=True)
class Confinement:
    """Who the process is and what it may use."""

    uid: int
    gid: int
    memory_mib: int
    """Guest memory its control group may hold; the driver adds what its VMM needs besides."""
    pids: int = 64
    background: bool = False
    """Get a fraction of the CPU time other VMs get, until `Vm.promote`."""


@dataclass(frozen=True)
class VmSpec:
    """A VM to start. `workdir` exists, belongs to the VM's uid, and is the driver's to fill; the driver
    removes nothing outside it.
    """

    vm_id: str
    workdir: Path
    vcpus: int
    memory_mib: int
    memory: Path
    """Memory image, exactly `memory_mib` MiB; mapped privately, never written."""
    disks: Sequence[Path]
    network: NetworkAttachment
    confinement: Confinement


@dataclass(frozen=True)
class BootSource:
    kernel: Path
    initramfs: Path
    command_line: str
    """Guest arguments; the driver adds what its machine needs (console, clock)."""
    key: str
    """Content key of kernel and initramfs, for the manifest."""


@dataclass(frozen=True)
class VmRecord:
    """Everything needed to adopt a running VM from another server process. JSON-able."""

    vm_id: str
    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat: with the pid it names a process for good."""
    workdir: str
    manifest: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    """The driver's own."""


@dataclass(frozen=True)
class MemoryRange:
    guest_offset: int
    host_address: int
    length: int


@dataclass(frozen=True)
class ProcessMemory:
    """Dirty pages still in a stopped process. The descriptors are the caller's to close (`os.close`)."""

    mem_fd: int
    pagemap_fd: int
    ranges: Sequence[MemoryRange]


@dataclass(frozen=True)
class SparseDiff:
    """Dirty pages as the data extents of a sparse file the size of the memory.

    The caller removes the file when it keeps the capture. While it is there the next save adds to it, so that a capture
    given up loses nothing.
    """

    path: Path


@dataclass(frozen=True)
class SavedVm:
    """A stopped VM's device state (KiB, opaque) and where its dirty memory is."""

    state: bytes
    memory: ProcessMemory | SparseDiff


@dataclass(frozen=True)
class VmStats:
    cpu_s: float
    resident_bytes: int
    private_bytes: int


class Vm(Protocol):
    """One VM process. Methods raise SandboxLost once the process is gone."""

    @property
    def record(self) -> VmRecord: ...

    async def suspend(self) -> None:
        """Stop the vCPUs, drain block I/O, take the VM off the network. Idempotent."""

    async def save(self) -> SavedVm:
        """Device state and dirty memory of a suspended VM, which stays suspended."""

    async def resume(self) -> None:
        """Go on in place. Idempotent. With SUCCESSION: the rollback of a capture, or the start of a VM
        restored stopped.
        """

    def promote(self) -> None:
        """A VM started in the background is as good as any other from now on. Idempotent, never raises."""

    async def stop(self) -> None:
        """End the process at once and release all that the driver holds for it. Idempotent, never raises
        SandboxLost.
        """

    async def wait(self) -> str:
        """Return when the process has ended: why, with the tail of its log."""

    async def console(self) -> str:
        """The tail of the serial console; "" when it cannot be had."""

    async def detach(self) -> None:
        """Let go of the process, which runs on; for a server that stops. Nothing else may be called
        afterwards. Idempotent.
        """

    def stats(self) -> VmStats: ...


class Successor(Protocol):
    """A process started beside its VM, waiting for the VM's state."""

    @property
    def record(self) -> VmRecord:
        """For adoption after a server crash: SandboxLost until it has the whole state; suspended if it had
        not begun to run.
        """

    async def take_over(self, state: bytes) -> Vm:
        """Load `state` and run. The predecessor must be suspended, the memory image complete.

        Raises: CorruptData, OperationFailed: the successor is gone and the predecessor as it was.
        SandboxLost: the successor had begun to run and may have written to the disks, so the predecessor must
        not go on.
        """

    async def discard(self) -> None:
        """End the waiting process. Idempotent."""


class Driver(Protocol):
    """All VMs of one kind on one node."""

    @property
    def capture_kind(self) -> CaptureKind: ...

    async def boot(self, spec: VmSpec, source: BootSource) -> Vm:
        """Start a VM on an all-zero memory image; returns when the vCPUs run."""

    async def restore(self, spec: VmSpec, state: bytes, manifest: Manifest, *, run: bool = True) -> Vm:
        """Start a VM from a saved state; `memory` holds what was captured with it. Returns when it runs, or
        is loaded and stopped.

        Raises: IncompatibleSnapshot, CorruptData (the VMM refused the state).
        """

    async def prepare_successor(self, predecessor: Vm, spec: VmSpec) -> Successor:
        """SUCCESSION only. `spec.memory` may be pending: it is not read before `take_over`. The disks are
        those of the predecessor.

        Raises: OperationFailed, predecessor untouched.
        """

    async def adopt(self, record: VmRecord) -> Vm:
        """Take over a VM that another server process started.

        Raises: SandboxLost when it is gone, is another process, or is a successor that never took over.
        """

    async def sweep(self, keep: Collection[VmRecord]) -> list[str]:
        """End every process of this node's driver that is not in `keep`. Returns a line for each."""

    def check(self, manifest: Manifest) -> None:
        """Raises: IncompatibleSnapshot when a state with this manifest cannot be restored here, saying which
        field and why.
        """
