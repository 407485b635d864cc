"""The API key: where it comes from and how one is compared."""

import hmac
import re
import secrets
from pathlib import Path

from aenv.errors import InvalidRequest
from aenv.node.secret_file import managed_secret
from aenv.settings import Settings

_KEY = re.compile(r"[A-Za-z0-9._~-]{32,256}")


def load_api_key(settings: Settings, directory: Path) -> str:
    """`settings.api_key`, else the content of `directory`/api-key (<home>/secrets), made at first use.

    A made one is `e2b_` and 40 hex digits: the form that older SDKs insist on.

    Raises: InvalidRequest for a malformed setting, CorruptData and OperationFailed for the file (see `managed_secret`).
    """
    if settings.api_key:
        if not _is_key(settings.api_key):
            raise InvalidRequest("setting api_key: 32 to 256 characters of A-Z a-z 0-9 . _ ~ -")
        return settings.api_key
    return managed_secret(directory / "api-key", generate=lambda: f"e2b_{secrets.token_hex(20)}", valid=_is_key)


def matches(given: bytes, key: str) -> bool:
    """Whether `given` is the key, in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given, key.encode())


def _is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None
