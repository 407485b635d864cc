"""One type per kind of identifier, and how new ones are made. No I/O beyond the system's random source."""

import re
import secrets
import string
from typing import NewType

SandboxId = NewType("SandboxId", str)
"""`i` and 19 lower-case alphanumerics. No dash: host labels are split on it."""
SnapshotId = NewType("SnapshotId", str)
"""A captured computer: template, persistent snapshot, pause or fork capture. `s` and 19 alphanumerics."""
LayerId = NewType("LayerId", str)
"""A sealed layer's file stem: 32 hex digits."""
MachineId = NewType("MachineId", str)
"""One VMM process and what belongs to it. `m` and 15 hex digits."""
InstanceId = NewType("InstanceId", str)
"""A node's short name in host-global names: 4 lower-case alphanumerics, fixed for one AENV_HOME."""

_ALPHABET = string.ascii_lowercase + string.digits
_SANDBOX = re.compile(r"i[a-z0-9]{19}")


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def new_sandbox_id() -> SandboxId:
    return SandboxId("i" + _random(19))


def new_snapshot_id() -> SnapshotId:
    return SnapshotId("s" + _random(19))


def new_layer_id() -> LayerId:
    return LayerId(secrets.token_hex(16))


def new_machine_id() -> MachineId:
    return MachineId("m" + secrets.token_hex(8)[:15])


def new_instance_id() -> InstanceId:
    return InstanceId(_random(4))


def is_sandbox_id(text: str) -> bool:
    return _SANDBOX.fullmatch(text) is not None
