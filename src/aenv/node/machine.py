"""A machine: what one running computer holds on this host. machines.py makes and frees
them, capture.py captures them."""

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from aenv.errors import OperationFailed
from aenv.guest.client import EnvdClient
from aenv.ids import LayerId, MachineId
from aenv.network.slot import Slot
from aenv.vmm.contract import Manifest, Vm, VmRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """Sizes in MiB."""

    vcpus: int
    memory_mib: int
    disk_mib: int


@dataclass
class Machine:
    """A running (or suspended) computer. Layers are bottom to top: what it stands on now."""

    id: MachineId
    """Names the VMM process, its working directory and its memory image; changes with every succession."""
    owner: str
    shape: Shape
    vm: Vm
    slot: Slot
    guest: EnvdClient
    manifest: Manifest
    disk_image: str
    """Name of the disk's image in blockd; it outlives successions."""
    disk_path: Path
    disk_layers: tuple[LayerId, ...]
    memory_layers: tuple[LayerId, ...]
    successor: VmRecord | None = None
    """While a capture hands over: who is to take over. After a crash, adoption decides between the two."""

    @property
    def layers(self) -> tuple[LayerId, ...]:
        return self.disk_layers + self.memory_layers

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """The answer to `call`, one of `guest`'s, which by itself does not notice the end of the VM.

        Raises: what the call raises; OperationFailed when the VM ends before.
        """
        calling, ending = asyncio.ensure_future(call), asyncio.ensure_future(self.vm.wait())
        try:
            await asyncio.wait((calling, ending), return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise OperationFailed(f"the VM of {self.owner} has ended: {ending.result()}")
        finally:
            for task in (calling, ending):
                task.cancel()
            await asyncio.gather(calling, ending, return_exceptions=True)

    def to_json(self) -> dict[str, Any]:
        """What `Machines.adopt` needs."""
        return {
            "shape": asdict(self.shape),
            "vm": asdict(self.vm.record),
            "successor": asdict(self.successor) if self.successor else None,
            "slot": self.slot.index,
            "disk_image": self.disk_image,
            "memory_layers": list(self.memory_layers),
        }


@dataclass(frozen=True)
class Capture:
    """What a capture made: new layers exist (not yet synced), `state` is the device state."""

    disk_layers: tuple[LayerId, ...]
    memory_layers: tuple[LayerId, ...]
    state: bytes
    manifest: Manifest
    user_frozen: bool
    stopped_s: float
    """From the stop of the vCPUs to the end of the capture or, if the machine went on, to its going on."""
    diff: Path | None = None
    """Where the VMM that goes on collects dirty pages: those of this capture too, until it is kept for good."""
