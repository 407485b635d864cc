"""Tokens of a sandbox, derived and never stored: whoever has the seed can tell them again after a restart or move."""

import hmac
import re
import secrets
from pathlib import Path

from aenv.node.secret_file import managed_secret

_SEED = re.compile(r"[0-9a-f]{64}")


class Tokens:
    """HMAC-SHA256 under the node's seed. The seed appears in no message and no representation."""

    def __init__(self, seed: str) -> None:
        self._seed = seed.encode()

    @classmethod
    def load(cls, directory: Path) -> "Tokens":
        """From `directory`/sandbox-token-seed (<home>/secrets), made at first use. Nodes that move sandboxes share one.

        Raises: CorruptData, OperationFailed (see `managed_secret`).
        """
        path = directory / "sandbox-token-seed"
        return cls(
            managed_secret(path, generate=lambda: secrets.token_hex(32), valid=lambda text: bool(_SEED.fullmatch(text)))
        )

    def envd(self, sandbox_id: str) -> str:
        """What the sandbox's agent demands as `X-Access-Token`: 64 hex digits."""
        return self._derive(sandbox_id)

    def traffic(self, sandbox_id: str) -> str:
        """What edge demands as `e2b-traffic-access-token` on ports that are not public: 64 hex digits."""
        return self._derive(f"sandbox-traffic-{sandbox_id}")

    def _derive(self, text: str) -> str:
        return hmac.digest(self._seed, text.encode(), "sha256").hex()
