"""Machines of a hot template that are restored, run in and suspended, so that a create need only take one.

Running in pays even for a restored machine: under emulation the first second is spent translating code, under KVM
faulting pages in. A machine of the pool has no identity yet and its route is closed; what makes it somebody's is
`init`, as for every restored one.
"""

import asyncio

import structlog

from aenv.aiokit import TaskSet
from aenv.errors import AenvError
from aenv.ids import SnapshotId
from aenv.network.policy import NetworkPolicy
from aenv.node.machine import Machine, Shape
from aenv.node.machines import Machines
from aenv.snapshots.records import SnapshotRecord
from aenv.snapshots.store import SnapshotStore

log = structlog.get_logger(__name__)

OWNER = "warm-pool"
_RETRY_S = 30.0


class WarmPool:
    """Holds up to `size` machines of one template. `take` never waits."""

    def __init__(self, machines: Machines, snapshots: SnapshotStore, tasks: TaskSet, size: int) -> None:
        self._machines = machines
        self._snapshots = snapshots
        self._tasks = tasks
        self._size = size
        self._template: SnapshotRecord | None = None
        self._ready: list[Machine] = []
        self._wanted = asyncio.Event()
        self._filled = asyncio.Event()

    @property
    def ready(self) -> int:
        return len(self._ready)

    def serve(self, template: SnapshotRecord) -> None:
        """Begin to keep machines of `template` ready."""
        self._template = template
        if self._size:
            self._wanted.set()
            self._tasks.spawn(self._fill(), name="warm-pool")

    def take(self, template: SnapshotId) -> Machine | None:
        """A suspended machine that is the caller's from now on, or None."""
        if self._template is None or self._template.id != template or not self._ready:
            return None
        self._wanted.set()
        self._filled.clear()
        return self._ready.pop(0)

    async def full(self) -> None:
        """Return when the pool has all its machines."""
        if self._size:
            await self._filled.wait()

    async def close(self) -> None:
        """Release what is ready; call it after the tasks have ended."""
        self._size = 0
        while self._ready:
            await self._machines.release(self._ready.pop())

    async def _fill(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while len(self._ready) < self._size:
                try:
                    self._ready.append(await self._make())
                except AenvError as error:
                    log.warning("warm pool could not make a machine", error=str(error))
                    await asyncio.sleep(_RETRY_S)
            self._filled.set()

    async def _make(self) -> Machine:
        template = self._template
        assert template is not None
        machine = await self._machines.restore(
            Shape(template.vcpus, template.memory_mib, template.disk_mib),
            template.disk_layers,
            template.memory_layers,
            self._snapshots.state(template),
            template.manifest,
            owner=OWNER,
            policy=NetworkPolicy(),
        )
        try:
            await machine.guest.wait_healthy(self._machines.settings.restore_timeout_s)
            await machine.guest.unfreeze()
            await machine.guest.run("true", user="user")
            await machine.guest.freeze(self._machines.settings.freeze_timeout_s)
            await machine.vm.suspend()
        except BaseException:
            await self._machines.release(machine)
            raise
        return machine
