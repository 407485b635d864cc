"""Filters, order and pages of lists."""

import base64
import binascii
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from aenv.errors import InvalidRequest
from aenv.node.views import PublicState, SandboxView

T = TypeVar("T")
MAX_PAGE = 100
NEXT_TOKEN = "X-Next-Token"

Place = tuple[datetime, str]
"""Where an item stands in a list: by time, then by id."""


def metadata_filter(text: str | None) -> dict[str, str]:
    """What a sandbox's metadata must contain. SDKs encode it thrice; the framework has undone one of them."""
    pairs = parse_qsl(text or "", keep_blank_values=True)
    return {unquote(key): unquote(value) for key, value in pairs}


def state_filter(text: str | None) -> frozenset[PublicState]:
    """A comma-joined list of states; none given: all. Raises: InvalidRequest."""
    if not text:
        return frozenset(PublicState)
    try:
        return frozenset(PublicState(word.strip()) for word in text.split(","))
    except ValueError:
        raise InvalidRequest("state: a comma-joined list of running and paused") from None


def instant(name: str, text: str) -> datetime:
    """Raises: InvalidRequest for what is no RFC 3339 time with a zone."""
    try:
        parsed = datetime.fromisoformat(text)
        if parsed.tzinfo is not None:
            return parsed.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise InvalidRequest(f"{name}: an RFC 3339 time with a zone")


def has(view: SandboxView, metadata: dict[str, str]) -> bool:
    return all(view.metadata.get(key) == value for key, value in metadata.items())


def page(
    items: Sequence[T],
    place: Callable[[T], Place],
    *,
    ascending: bool = False,
    limit: int | None = None,
    token: str | None = None,
) -> tuple[list[T], str | None]:
    """The items of one page, newest first unless `ascending`, and the token of the next page if there is one.

    A token names the place of the last item, so that items which come and go shift nothing. Raises: InvalidRequest.
    """
    ordered = sorted(items, key=place, reverse=not ascending)
    if token:
        after = _place(token)
        ordered = [item for item in ordered if (place(item) > after) == ascending and place(item) != after]
    size = limit or MAX_PAGE
    chosen = ordered[:size]
    return chosen, _token(place(chosen[-1])) if len(ordered) > size else None


def _token(place: Place) -> str:
    return base64.urlsafe_b64encode(f"{place[0].astimezone(UTC).isoformat()}|{place[1]}".encode()).decode()


def _place(token: str) -> Place:
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
        time, separator, name = text.partition("|")
        if separator:
            return instant("nextToken", time), name
    except (ValueError, binascii.Error, InvalidRequest):
        pass
    raise InvalidRequest("nextToken: not a token of this server")
