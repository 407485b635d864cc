"""Makes, adopts and frees machines. Each step that fails takes back what the earlier ones took.

The steps are those of the design: slot, images, VMM process, guest agent. Who may use a machine and when is not
decided here (node/sandbox.py does); no call may be made on a machine while another is under way. Capturing is in
node/capture.py.
"""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from aenv.aiokit import all_done
from aenv.errors import AenvError, CorruptData, GuestUnresponsive, NotFound, OperationFailed, SandboxLost
from aenv.guest.client import EnvdClient
from aenv.ids import LayerId, MachineId, new_machine_id
from aenv.ledger import Ledger
from aenv.network.policy import NetworkPolicy
from aenv.network.pool import SlotPool
from aenv.network.slot import Slot
from aenv.node.machine import Machine, Shape
from aenv.node.paths import NodePaths
from aenv.settings import Settings
from aenv.snapshots.layers import LayerStore
from aenv.storage.client import BlockdClient
from aenv.vmm.contract import (
    BootSource,
    CaptureKind,
    Confinement,
    Driver,
    Manifest,
    NetworkAttachment,
    Vm,
    VmRecord,
    VmSpec,
)

log = structlog.get_logger(__name__)

MIB = 1024 * 1024

Start = Callable[[VmSpec], Awaitable[Vm]]


class Machines:
    def __init__(
        self,
        *,
        settings: Settings,
        paths: NodePaths,
        ledger: Ledger,
        driver: Driver,
        slots: SlotPool,
        storage: BlockdClient,
        layers: LayerStore,
    ) -> None:
        self.settings = settings
        self.driver = driver
        self.storage = storage
        self.layers = layers
        self._paths = paths
        self._ledger = ledger
        self._slots = slots

    async def boot(self, shape: Shape, disk_layers: Sequence[LayerId], source: BootSource, *, owner: str) -> Machine:
        """First boot on an all-zero memory. Returns when the guest agent answers; a guest that does not come up is
        tried once more, because an emulated one may hang for good while it boots.

        Raises: any AenvError; nothing is left then.
        """
        try:
            return await self._boot(shape, disk_layers, source, owner)
        except OperationFailed as error:
            log.warning("guest did not come up, trying once more", owner=owner, error=error.message)
            return await self._boot(shape, disk_layers, source, owner)

    async def _boot(self, shape: Shape, disk_layers: Sequence[LayerId], source: BootSource, owner: str) -> Machine:
        async def start(spec: VmSpec) -> Vm:
            return await self.driver.boot(spec, source)

        machine = await self._start(shape, disk_layers, (), start, owner=owner, policy=NetworkPolicy())
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.release, machine)
            await self._come_up(machine)
            undo.pop_all()
        return machine

    async def _come_up(self, machine: Machine) -> None:
        """Return when the guest answers. Raises: OperationFailed, with what it said last, when it ends or is silent."""
        try:
            await machine.ask(machine.guest.wait_healthy(self.settings.boot_timeout_s))
        except GuestUnresponsive as error:
            tail = (await machine.vm.console())[-2000:]
            raise OperationFailed(f"the guest did not come up: {error.message}\n{tail}") from error

    async def restore(
        self,
        shape: Shape,
        disk_layers: Sequence[LayerId],
        memory_layers: Sequence[LayerId],
        state: bytes,
        manifest: Manifest,
        *,
        owner: str,
        policy: NetworkPolicy,
        background: bool = False,
    ) -> Machine:
        """A machine that goes on from a captured state, its user processes still frozen; one for the background yields
        to others until it is assigned. Raises: any AenvError; nothing is left then.
        """
        self.driver.check(manifest)

        async def start(spec: VmSpec) -> Vm:
            confinement = replace(spec.confinement, background=background)
            return await self.driver.restore(replace(spec, confinement=confinement), state, manifest)

        return await self._start(shape, disk_layers, memory_layers, start, owner=owner, policy=policy)

    async def release(self, machine: Machine, *, but_the_slot: bool = False) -> None:
        """Free everything the machine holds; what is gone already is fine. What the guest had in memory is lost.

        `but_the_slot`: its address may still be somebody's way to the sandbox, so it must not become another's; it too
        is left to the sweep, as when the process does not end. What resists is logged and left to the sweep of the
        next start; nothing is raised.
        """
        ended = await self.free_process(machine.vm)
        if ended and not but_the_slot:
            with _left_to_the_sweep(f"network slot {machine.slot.index}"):
                self._slots.release(machine.slot)
        await asyncio.gather(self.free_image(machine.disk_image), self.free_image(memory_image(machine.id)))
        self.free_workdir(machine.id)

    def assign(self, machine: Machine, owner: str) -> None:
        """Hand a machine (of the warm pool) to another owner."""
        machine.owner = owner
        machine.vm.promote()
        self._ledger.record("vm", machine.id, owner=owner)
        for image in (machine.disk_image, memory_image(machine.id)):
            self._ledger.record("image", image, owner=owner)
        self._slots.assign(machine.slot, owner)

    async def set_policy(self, machine: Machine, policy: NetworkPolicy) -> None:
        await self._slots.set_policy(machine.slot, policy)

    async def _start(
        self,
        shape: Shape,
        disk_layers: Sequence[LayerId],
        memory_layers: Sequence[LayerId],
        start: Start,
        *,
        owner: str,
        policy: NetworkPolicy,
    ) -> Machine:
        machine_id = new_machine_id()
        disk_image = f"{machine_id}-disk"
        async with AsyncExitStack() as undo:
            slot = await self._slots.acquire(owner, policy)
            undo.callback(self._slots.release, slot)
            undo.callback(self.free_workdir, machine_id)
            workdir = self.make_workdir(machine_id, owner, slot)
            undo.push_async_callback(self.free_image, disk_image)
            undo.push_async_callback(self.free_image, memory_image(machine_id))
            disk, memory = await all_done(
                self._open_disk(disk_image, shape, disk_layers, slot, owner),
                self.open_memory(machine_id, shape, memory_layers, slot, owner),
            )
            vm = await start(self.spec(machine_id, workdir, shape, memory=memory, disk=disk, slot=slot))
            undo.pop_all()
        return Machine(
            id=machine_id,
            owner=owner,
            shape=shape,
            vm=vm,
            slot=slot,
            guest=EnvdClient(slot.host_address),
            manifest=Manifest.from_json(vm.record.manifest),
            disk_image=disk_image,
            disk_path=disk,
            disk_layers=tuple(disk_layers),
            memory_layers=tuple(memory_layers),
        )

    # the parts: freeing one that was not, or only half, made is fine, and what resists is left to the sweep

    def spec(
        self, machine_id: MachineId, workdir: Path, shape: Shape, *, memory: Path, disk: Path, slot: Slot
    ) -> VmSpec:
        return VmSpec(
            vm_id=machine_id,
            workdir=workdir,
            vcpus=shape.vcpus,
            memory_mib=shape.memory_mib,
            memory=memory,
            disks=(disk,),
            network=NetworkAttachment(slot.netns, slot.tap, slot.mac),
            confinement=Confinement(uid=slot.uid, gid=slot.uid, memory_mib=shape.memory_mib),
        )

    def make_workdir(self, machine_id: MachineId, owner: str, slot: Slot) -> Path:
        self._ledger.record("vm", machine_id, owner=owner)
        path = self._paths.machines / machine_id
        path.mkdir(mode=0o700)
        os.chown(path, slot.uid, slot.uid)
        return path

    async def free_process(self, vm: Vm) -> bool:
        """Whether it has ended."""
        with _left_to_the_sweep(f"process {vm.record.pid}"):
            await vm.stop()
            return True
        return False

    def free_workdir(self, machine_id: MachineId) -> None:
        with _left_to_the_sweep(f"directory of {machine_id}"):
            shutil.rmtree(self._paths.machines / machine_id, ignore_errors=True)
            self._ledger.erase("vm", machine_id)

    async def _open_disk(self, image: str, shape: Shape, layers: Sequence[LayerId], slot: Slot, owner: str) -> Path:
        self._ledger.record("image", image, owner=owner)
        upper = self._paths.uppers / image
        upper.mkdir(mode=0o700)
        os.chown(upper, self.settings.blockd_uid, self.settings.blockd_uid)
        with _layers_needed():
            opened = await self.storage.open_disk(
                image, layers=self.layers.paths(layers), size=shape.disk_mib * MIB, upper=upper, uid=slot.uid
            )
        return opened.path

    async def open_memory(
        self, machine_id: MachineId, shape: Shape, layers: Sequence[LayerId] | None, slot: Slot, owner: str
    ) -> Path:
        """Memory of these layers, all zero without any; None: pending."""
        image, size = memory_image(machine_id), shape.memory_mib * MIB
        self._ledger.record("image", image, owner=owner)
        if layers is None:
            opened = await self.storage.open_pending_memory(image, size=size, uid=slot.uid)
        else:
            with _layers_needed():
                opened = await self.storage.open_memory(
                    image, layers=self.layers.paths(layers), size=size, uid=slot.uid
                )
        return opened.path

    async def free_image(self, image: str) -> None:
        with _left_to_the_sweep(f"image {image}"):
            await self.storage.close(image, discard=True)
            shutil.rmtree(self._paths.uppers / image, ignore_errors=True)
            self._ledger.erase("image", image)

    # after a restart of the server

    async def adopt(self, owner: str, data: dict[str, Any]) -> Machine:
        """Take over a machine that another server process started, running or stopped for a capture that never ended.

        A handover that was under way is decided: the successor if it took over, else the predecessor.

        Raises: SandboxLost; what there is of it is the sweep's then.
        """
        try:
            async with AsyncExitStack() as undo:
                shape = Shape(**data["shape"])
                vm = await self._adopt_vm(data)
                undo.push_async_callback(vm.detach)
                disk = await self.storage.image(data["disk_image"])
                memory = await self.storage.image(memory_image(MachineId(vm.record.vm_id)))
                if disk.failed or memory.failed:
                    raise SandboxLost("its storage failed")
                slot = await self._slots.adopt(data["slot"])
                undo.pop_all()
        except SandboxLost:
            raise
        except AenvError as error:
            raise SandboxLost(f"not found again after a restart: {error.message}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxLost(f"what was written down of its machine is malformed: {error!r}") from error
        if self.driver.capture_kind is CaptureKind.SUCCESSION:
            memory_layers = tuple(LayerStore.layer_of(path) for path in memory.layers)
        else:  # its image stays as it was at the start; captures since then are written down only
            memory_layers = tuple(LayerId(layer) for layer in data["memory_layers"])
        return Machine(
            id=MachineId(vm.record.vm_id),
            owner=owner,
            shape=shape,
            vm=vm,
            slot=slot,
            guest=EnvdClient(slot.host_address),
            manifest=Manifest.from_json(vm.record.manifest),
            disk_image=data["disk_image"],
            disk_path=disk.path,
            disk_layers=tuple(LayerStore.layer_of(path) for path in disk.layers),
            memory_layers=memory_layers,
        )

    async def _adopt_vm(self, data: dict[str, Any]) -> Vm:
        predecessor = VmRecord(**data["vm"])
        if data["successor"] is not None:
            try:
                return await self.driver.adopt(VmRecord(**data["successor"]))
            except SandboxLost:
                pass
        return await self.driver.adopt(predecessor)

    async def sweep(self, keep: Sequence[Machine]) -> int:
        """Free whatever this node holds beyond `keep`. Returns how many things were freed. Raises: OperationFailed
        when blockd or the driver cannot tell what there is.
        """
        machine_ids = {machine.id for machine in keep}
        images = {machine.disk_image for machine in keep} | {memory_image(i) for i in machine_ids}
        freed = len(await self.driver.sweep([machine.vm.record for machine in keep]))
        for path in self._paths.machines.iterdir():
            if path.name not in machine_ids:
                self.free_workdir(MachineId(path.name))
                freed += 1
        for image in await self.storage.images():
            if image.id not in images:
                await self.free_image(image.id)
                freed += 1
        for path in self._paths.uppers.iterdir():
            if path.name not in images:
                shutil.rmtree(path, ignore_errors=True)
        for entry in self._ledger.entries():
            known = machine_ids if entry.kind == "vm" else images if entry.kind == "image" else None
            if known is not None and entry.name not in known:
                self._ledger.erase(entry.kind, entry.name)
        with _left_to_the_sweep("a network slot"):
            await self._slots.sweep({machine.slot.index for machine in keep})
        return freed


@contextmanager
def _left_to_the_sweep(thing: str) -> Iterator[None]:
    """Freeing one thing must not keep the others from being freed, whatever goes wrong with it."""
    try:
        yield
    except Exception as error:
        log.error("could not be freed; left to the sweep of the next start", thing=thing, error=str(error))


@contextmanager
def _layers_needed() -> Iterator[None]:
    """What is not found is a layer of a snapshot that exists."""
    try:
        yield
    except NotFound as error:
        raise CorruptData(
            f"a layer is missing: {error.message}", hint="restore the file, or delete what stands on it"
        ) from error


def memory_image(machine_id: MachineId) -> str:
    return f"{machine_id}-memory"
