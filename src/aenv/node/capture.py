"""Capturing a running machine: freeze, stop, save, seal; then it is released, goes on in a successor, or goes on in
place.

Order and reasons are the design's: user processes are frozen from before the stop until after `init`, and the disk is
sealed only after the VMM has drained its I/O. Until a capture is whole, every failure can be rolled back.
"""

import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from aenv.aiokit import all_done
from aenv.clock import Clock
from aenv.errors import GuestUnresponsive, OperationFailed
from aenv.guest.client import InitRequest
from aenv.ids import LayerId, new_machine_id
from aenv.node.machine import Capture, Machine
from aenv.node.machines import MIB, Machines, memory_image
from aenv.vmm.contract import CaptureKind, ProcessMemory, SavedVm, SparseDiff

log = structlog.get_logger(__name__)

MAX_LAYERS = 250
"""A stack has at most 255 (docs/formats/lsmt.md). Nothing compacts stacks yet."""


class Capturer:
    """Captures machines of one node. New layers are held by the `holder` given; whoever gave it releases it."""

    def __init__(self, machines: Machines, clock: Clock) -> None:
        self._machines = machines
        self._clock = clock

    async def capture_and_stop(self, machine: Machine, *, holder: str, require_healthy_guest: bool = False) -> Capture:
        """Capture; the machine stays suspended, to be released or to go on through `roll_back`.

        Raises: GuestUnresponsive, OperationFailed, StorageFull: `roll_back` lets it go on. SandboxLost: it is gone.
        """
        frozen = await self._freeze(machine, required=require_healthy_guest)
        started = self._clock.monotonic_s()
        layers, state, diff = await self._capture(machine, holder)
        stopped_s = self._clock.monotonic_s() - started
        return self._result(machine, layers, state, diff, frozen=frozen, stopped_s=stopped_s)

    async def capture_and_continue(
        self,
        machine: Machine,
        *,
        holder: str,
        persist: Callable[[], Awaitable[None]],
        require_healthy_guest: bool = False,
    ) -> Capture:
        """Capture; the machine goes on at once, in place or in a successor, as its VMM can.

        `persist` is awaited once the successor is known and before it may take over, so that a crash in between is
        survived. Call `keep` once the record of the machine, which stands on the new layers now, is durable.

        Raises: as `capture_and_stop`.
        """
        if self._machines.driver.capture_kind is CaptureKind.TRACKING:
            capture = await self.capture_and_stop(machine, holder=holder, require_healthy_guest=require_healthy_guest)
            await self.roll_back(machine)
            machine.memory_layers = capture.memory_layers
            return capture
        machines, successor_id = self._machines, new_machine_id()
        async with AsyncExitStack() as undo:
            undo.callback(machines.free_workdir, successor_id)
            workdir = machines.make_workdir(successor_id, machine.owner, machine.slot)
            undo.push_async_callback(machines.free_image, memory_image(successor_id))
            memory = await machines.open_memory(successor_id, machine.shape, None, machine.slot, machine.owner)
            spec = machines.spec(
                successor_id, workdir, machine.shape, memory=memory, disk=machine.disk_path, slot=machine.slot
            )
            successor = await machines.driver.prepare_successor(machine.vm, spec)
            undo.push_async_callback(successor.discard)
            machine.successor = successor.record
            undo.callback(setattr, machine, "successor", None)
            await persist()
            freeze_began = self._clock.monotonic_s()
            frozen = await self._freeze(machine, required=require_healthy_guest)
            started = self._clock.monotonic_s()
            layers, state, _ = await self._capture(machine, holder)
            await machines.storage.complete(memory_image(successor_id), machines.layers.paths(layers))
            vm = await successor.take_over(state)
            stopped_s = self._clock.monotonic_s() - started
            undo.pop_all()
        predecessor, predecessor_id = machine.vm, machine.id
        machine.vm, machine.id, machine.successor, machine.memory_layers = vm, successor_id, None, layers
        capture = self._result(machine, layers, state, None, frozen=frozen, stopped_s=stopped_s)

        async def free_predecessor() -> None:
            await machines.free_process(predecessor)
            await machines.free_image(memory_image(predecessor_id))
            machines.free_workdir(predecessor_id)

        async def thaw() -> None:
            await self._thaw(machine)
            frozen_s = self._clock.monotonic_s() - freeze_began
            log.info("captured", sandbox=machine.owner, stopped_s=round(stopped_s, 4), frozen_s=round(frozen_s, 4))

        await all_done(thaw(), free_predecessor())
        return capture

    async def roll_back(self, machine: Machine) -> None:
        """Let a suspended machine go on in place; idempotent. Raises: OperationFailed, SandboxLost: it cannot go on."""
        await machine.vm.resume()
        await self._thaw(machine)

    def keep(self, capture: Capture) -> None:
        """The capture is written down for good: the machine's next one need not hold its pages too."""
        if capture.diff is not None:
            capture.diff.unlink(missing_ok=True)

    def _result(
        self,
        machine: Machine,
        memory: tuple[LayerId, ...],
        state: bytes,
        diff: Path | None,
        *,
        frozen: bool,
        stopped_s: float,
    ) -> Capture:
        return Capture(
            disk_layers=machine.disk_layers,
            memory_layers=memory,
            state=state,
            diff=diff,
            manifest=machine.manifest,
            user_frozen=frozen,
            stopped_s=stopped_s,
        )

    async def _freeze(self, machine: Machine, *, required: bool) -> bool:
        try:
            result = await machine.ask(machine.guest.freeze(self._machines.settings.freeze_timeout_s))
            reason = result.reason
            if result.frozen:
                return True
        except (GuestUnresponsive, OperationFailed) as error:
            reason = error.message
        if required:
            raise GuestUnresponsive(
                f"the sandbox's processes did not freeze: {reason}",
                hint="retry, or pause without requireHealthyGuest",
            )
        log.warning("captured without freezing user processes", owner=machine.owner, reason=reason)
        return False

    async def _thaw(self, machine: Machine) -> None:
        """After a stop the wall clock lags by its length: set it, then let the user's processes go on. They go on with
        a wrong clock rather than not at all.
        """
        request = InitRequest(timestamp=self._clock.now(), entropy=secrets.token_bytes(32), thaw=True)
        try:
            try:
                await machine.ask(machine.guest.init(request, timeout_s=self._machines.settings.freeze_timeout_s))
            except (GuestUnresponsive, OperationFailed) as error:
                log.warning("guest did not take the time; thawing it", owner=machine.owner, error=error.message)
                await machine.ask(machine.guest.unfreeze())
        except (GuestUnresponsive, OperationFailed) as error:
            log.error("guest did not thaw", owner=machine.owner, error=error.message)

    async def _capture(self, machine: Machine, holder: str) -> tuple[tuple[LayerId, ...], bytes, Path | None]:
        """Stop, save, seal. Returns memory layers, device state and the VMM's file of dirty pages if there is one;
        `machine.disk_layers` has the sealed layer.
        """
        machines = self._machines
        if max(len(machine.disk_layers), len(machine.memory_layers)) >= MAX_LAYERS:
            raise OperationFailed(
                f"the sandbox was captured {MAX_LAYERS} times already",
                hint="copy what matters into a new sandbox of the template",
            )
        disk, memory = machines.layers.new(), machines.layers.new()
        machines.layers.hold(holder, [*machine.layers, disk, memory])
        await machine.vm.suspend()
        saved = await machine.vm.save()
        try:
            await all_done(self._seal(machine, disk), self._capture_memory(machine, saved, memory))
        finally:
            if isinstance(saved.memory, ProcessMemory):
                os.close(saved.memory.mem_fd)
                os.close(saved.memory.pagemap_fd)
        diff = saved.memory.path if isinstance(saved.memory, SparseDiff) else None
        return (*machine.memory_layers, memory), saved.state, diff

    async def _seal(self, machine: Machine, layer: LayerId) -> None:
        await self._machines.storage.snapshot(machine.disk_image, self._machines.layers.path(layer))
        machine.disk_layers += (layer,)

    async def _capture_memory(self, machine: Machine, saved: SavedVm, layer: LayerId) -> None:
        storage, path = self._machines.storage, self._machines.layers.path(layer)
        size = machine.shape.memory_mib * MIB
        if isinstance(saved.memory, ProcessMemory):
            await storage.capture_memory(
                path,
                size=size,
                ranges=saved.memory.ranges,
                mem_fd=saved.memory.mem_fd,
                pagemap_fd=saved.memory.pagemap_fd,
            )
        else:
            await storage.import_memory(saved.memory.path, path, size=size)
