"""Machines of a hot template that are restored, run in and suspended, so that a create need only take one.

Running in pays even for a restored machine: under emulation the first second is spent translating code, under KVM
faulting pages in. A machine of the pool has no identity yet and its route is closed; what makes it somebody's is
`init`, as for every restored one. They are made in the background: those who wait for an answer go first.
"""

import asyncio
import secrets
from datetime import UTC, datetime

import structlog

from aenv.aiokit import TaskSet
from aenv.errors import AenvError
from aenv.guest.client import EnvdClient, InitRequest
from aenv.ids import SnapshotId
from aenv.network.policy import NetworkPolicy
from aenv.node.machine import Machine, Shape
from aenv.node.machines import Machines
from aenv.snapshots.records import SnapshotRecord
from aenv.snapshots.store import SnapshotStore

log = structlog.get_logger(__name__)

OWNER = "warm-pool"
POLICY = NetworkPolicy()
"""What a ready machine may reach, which is nothing while it is suspended."""
_RETRY_S = 30.0
_REFILL_DELAY_S = 1.0
"""Whoever took a machine is about to run a first command in it; what replaces it can wait."""
_RUN_IN_COMMAND = "exec /bin/bash -l -c true"
"""What SDKs run, a login shell; an image without bash is run in as far as its /bin/sh."""
_RUN_IN_COMMANDS = 2
_NOBODY = "warm-pool"


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
                except (AenvError, OSError) as error:
                    log.warning("warm pool could not make a machine", error=str(error))
                    await asyncio.sleep(_RETRY_S)
            self._filled.set()
            await self._wanted.wait()
            await asyncio.sleep(_REFILL_DELAY_S)

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
            policy=POLICY,
            background=True,
        )
        try:
            await machine.ask(self._run_in(machine.guest))
            await machine.vm.suspend()
        except BaseException:
            await self._machines.release(machine)
            raise
        return machine

    async def _run_in(self, guest: EnvdClient) -> None:
        settings = self._machines.settings
        await guest.init(_run_in_request(), timeout_s=settings.restore_timeout_s)
        for _ in range(_RUN_IN_COMMANDS):
            await guest.run(_RUN_IN_COMMAND, user="user")
        await guest.freeze(settings.freeze_timeout_s)


def _run_in_request() -> InitRequest:
    """Goes the whole way of the one that will make the machine somebody's and replace all that is set here."""
    return InitRequest(
        access_token="",
        env_vars={},
        timestamp=datetime.now(UTC),
        entropy=secrets.token_bytes(64),
        hostname=_NOBODY,
        machine_id=secrets.token_hex(16),
        dns_servers=[],
        default_user="user",
        sandbox_id=_NOBODY,
        template_id=_NOBODY,
        lifecycle_id=_NOBODY,
        thaw=True,
    )
