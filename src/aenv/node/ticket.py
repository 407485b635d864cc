"""A request on its way through a sandbox's queue, and what a sandbox starts from. Values only."""

import asyncio
from dataclasses import dataclass, field

from aenv.errors import AenvError
from aenv.ids import MachineId
from aenv.lifecycle.events import Event
from aenv.node.machine import Capture, Shape
from aenv.snapshots.records import SnapshotRecord


@dataclass(frozen=True)
class Origin:
    """What a sandbox starts from: a snapshot record, or a capture that is none (a fork's)."""

    shape: Shape
    capture: Capture
    warm: bool = False
    """A machine of the warm pool may be taken instead of a restore."""


@dataclass
class Ticket:
    """A request in the queue, with its arguments and where its answer goes. Without a future nobody waits."""

    event: Event
    future: asyncio.Future["Ticket"] | None = None
    timeout_s: int | None = None
    require_healthy_guest: bool = False
    snapshot_name: str | None = None
    machine: MachineId | None = None
    """For news of a VM: which."""
    # the answer
    resumed: bool = False
    snapshot: SnapshotRecord | None = None
    capture: Capture | None = None
    holder: str = ""
    """Who holds the capture's layers; the asker releases it."""
    error: AenvError | None = field(default=None, repr=False)

    def resolve(self) -> None:
        """Answer whoever waits, if anybody does."""
        if self.future is not None and not self.future.done():
            self.future.set_result(self)


def origin_of(snapshot: SnapshotRecord, state: bytes, *, warm: bool = False) -> Origin:
    """Where a sandbox of this snapshot starts."""
    shape = Shape(snapshot.vcpus, snapshot.memory_mib, snapshot.disk_mib)
    capture = Capture(
        disk_layers=snapshot.disk_layers,
        memory_layers=snapshot.memory_layers,
        state=state,
        manifest=snapshot.manifest,
        user_frozen=snapshot.user_frozen,
        stopped_s=0.0,
    )
    return Origin(shape, capture, warm)
