"""What every sandbox of a node works with. One object, made once by the server; it decides nothing."""

from dataclasses import dataclass, field

from aenv.aiokit import Bounded, TaskSet
from aenv.clock import Clock
from aenv.database import Database
from aenv.node.capacity import Capacity
from aenv.node.capture import Capturer
from aenv.node.deadlines import Deadlines
from aenv.node.front_door import FrontDoor
from aenv.node.machines import Machines
from aenv.node.tokens import Tokens
from aenv.node.warm_pool import WarmPool
from aenv.settings import Settings
from aenv.snapshots.layers import LayerStore
from aenv.snapshots.store import SnapshotStore


@dataclass
class Counters:
    starting: int = 0
    creates: int = 0
    create_failures: int = 0


@dataclass(frozen=True)
class Services:
    settings: Settings
    clock: Clock
    database: Database
    snapshots: SnapshotStore
    layers: LayerStore
    machines: Machines
    capturer: Capturer
    front_door: FrontDoor
    deadlines: Deadlines
    capacity: Capacity
    starts: Bounded
    tasks: TaskSet
    tokens: Tokens
    warm_pool: WarmPool
    boot_id: str
    dns_servers: list[str]
    counters: Counters = field(default_factory=Counters)
