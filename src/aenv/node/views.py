"""What the node says of its sandboxes, snapshots and templates: plain values, safe to hold, already truthful."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from aenv.ids import SandboxId, SnapshotId
from aenv.network.policy import NetworkPolicy


class PublicState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"


class OnTimeout(StrEnum):
    PAUSE = "pause"
    KILL = "kill"


@dataclass(frozen=True)
class CreateRequest:
    template: str
    """Template or snapshot: id or name."""
    timeout_s: int
    on_timeout: OnTimeout
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    secure: bool = True
    policy: NetworkPolicy = field(default_factory=NetworkPolicy)
    public_traffic: bool = True


@dataclass(frozen=True)
class SandboxView:
    id: SandboxId
    state: PublicState
    template_id: SnapshotId
    alias: str | None
    started_at: datetime
    end_at: datetime
    vcpus: int
    memory_mib: int
    disk_mib: int
    metadata: dict[str, str]
    envd_version: str
    access_token: str | None
    traffic_token: str | None
    on_timeout: OnTimeout
    policy: NetworkPolicy
    guest_unresponsive_at_pause: bool = False


@dataclass(frozen=True)
class SnapshotView:
    id: SnapshotId
    names: tuple[str, ...]
    source_sandbox: SandboxId | None
    created_at: datetime
    vcpus: int
    memory_mib: int
    disk_mib: int


@dataclass(frozen=True)
class NodeStats:
    running: int
    paused: int
    starting: int
    creates: int
    create_failures: int
    warm: int = 0
    """Machines of the warm pool that are ready."""
