"""What a captured computer is: template, persistent snapshot, pause and fork capture are one record type.

A record is a value: it names layers and a state file, and owns nothing. Who holds what is `layers.LayerStore`'s
business.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from aenv.errors import CorruptData
from aenv.ids import LayerId, SandboxId, SnapshotId
from aenv.vmm.contract import Manifest


class Kind(StrEnum):
    TEMPLATE = "template"
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    FORK = "fork"


@dataclass(frozen=True)
class SnapshotRecord:
    """Layers are bottom to top. Sizes in MiB. The device state is a file of its own, `state_sha256` its digest."""

    id: SnapshotId
    kind: Kind
    created_at: datetime
    manifest: Manifest
    disk_layers: tuple[LayerId, ...]
    memory_layers: tuple[LayerId, ...]
    state_sha256: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    envd_version: str
    boot_id: str
    """Of the host that captured it; until `durable`, layers are to be trusted only within that boot."""
    names: tuple[str, ...] = ()
    source_sandbox: SandboxId | None = None
    source_key: str = ""
    """What a template was built from (content key); empty for the others."""
    user_frozen: bool = True
    """False when the guest's processes would not freeze and were captured running."""
    durable: bool = False
    owner: str = "default"
    env: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["created_at"] = self.created_at.isoformat()
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SnapshotRecord:
        """Raises: CorruptData when a field is missing or of the wrong kind."""
        try:
            values = dict(data)
            values["kind"] = Kind(values["kind"])
            values["created_at"] = datetime.fromisoformat(values["created_at"])
            values["manifest"] = Manifest.from_json(values["manifest"])
            for name in ("disk_layers", "memory_layers", "names"):
                values[name] = tuple(values[name])
            return cls(**values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptData(f"malformed snapshot record: {error!r}") from error
