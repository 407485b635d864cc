"""What makes a restored guest this sandbox and no other: names, tokens, environment, clock, entropy."""

import hashlib
import secrets
from datetime import datetime

from aenv.guest.client import InitRequest
from aenv.node.record import SandboxRecord
from aenv.node.tokens import Tokens


def init_request(record: SandboxRecord, tokens: Tokens, *, now: datetime, dns_servers: list[str]) -> InitRequest:
    """The first thing a guest is told after each start. User processes stay frozen until they are thawed."""
    return InitRequest(
        access_token=tokens.envd(record.id) if record.secure else "",
        env_vars=record.env,
        timestamp=now,
        entropy=secrets.token_bytes(64),
        hostname=record.id,
        machine_id=hashlib.sha256(record.id.encode()).hexdigest()[:32],
        dns_servers=dns_servers,
        default_user="user",
        sandbox_id=record.id,
        template_id=record.template_id,
        lifecycle_id=f"{record.id}-{record.lifecycle.generation + 1}",
    )
