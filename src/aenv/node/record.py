"""What the node remembers of a sandbox over restarts, and how it is written: one row, one JSON value.

The row is written before the action it announces (node/sandbox.py says when). While a machine runs, the row names it,
so that the next server process can adopt it; while paused, it names the snapshot that holds the state.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from aenv.errors import CorruptData
from aenv.ids import SandboxId, SnapshotId
from aenv.lifecycle.machine import Lifecycle
from aenv.lifecycle.states import State, durable
from aenv.network.policy import NetworkPolicy
from aenv.node.machine import Shape
from aenv.node.views import OnTimeout

MIGRATIONS = ("CREATE TABLE sandboxes (id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT",)


@dataclass
class SandboxRecord:
    id: SandboxId
    lifecycle: Lifecycle
    template_id: SnapshotId
    alias: str | None
    shape: Shape
    envd_version: str
    created_at: datetime
    started_at: datetime
    end_at: datetime
    """Deadline while running; of no effect while paused."""
    timeout_s: int
    on_timeout: OnTimeout
    secure: bool
    public_traffic: bool
    policy: NetworkPolicy = field(default_factory=NetworkPolicy)
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    owner: str = "default"
    paused_as: SnapshotId | None = None
    machine: dict[str, Any] | None = None
    """`Machine.to_json` while there is one."""
    guest_unresponsive_at_pause: bool = False

    def to_json(self) -> dict[str, Any]:
        """The durable form."""
        data = asdict(self)
        for name in ("created_at", "started_at", "end_at"):
            data[name] = data[name].isoformat()
        data["lifecycle"]["state"] = durable(self.lifecycle.state)
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SandboxRecord:
        """Raises: CorruptData when a field is missing or of the wrong kind."""
        try:
            values = dict(data)
            for name in ("created_at", "started_at", "end_at"):
                values[name] = datetime.fromisoformat(values[name])
            lifecycle = values["lifecycle"]
            values["lifecycle"] = Lifecycle(
                State(lifecycle["state"]), lifecycle["generation"], lifecycle["route_generation"]
            )
            values["on_timeout"] = OnTimeout(values["on_timeout"])
            values["shape"] = Shape(**values["shape"])
            policy = values["policy"]
            values["policy"] = NetworkPolicy(policy["internet"], tuple(policy["allow_out"]), tuple(policy["deny_out"]))
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptData(f"malformed sandbox record: {error!r}") from error

    def save(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "INSERT INTO sandboxes VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record",
            (self.id, json.dumps(self.to_json())),
        )

    def remove(self, connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM sandboxes WHERE id = ?", (self.id,))
