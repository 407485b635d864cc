"""How an error of the tree is told over HTTP. The one table; nothing else in api/ knows a status of an error.

SDKs branch on it: a Python one on the status, a JavaScript one on `code` in the body, so the two are always equal. A
Python SDK repeats a request on `Should-Retry: true`, and on 429, 502, 503 and 504 without that header; a JavaScript one
on 429 with `Retry-After`. So every 429 and 503 says whether it is worth it.
"""

from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from aenv import errors


@dataclass(frozen=True)
class Row:
    status: int
    retry: bool | None = None
    """`Should-Retry`; None: not sent."""
    error_code: str | None = None
    """`error_code` in the body where the SDKs know one; None: the class's own."""


TABLE: dict[type[errors.AenvError], Row] = {
    errors.InvalidRequest: Row(400),
    errors.Unauthenticated: Row(401),
    errors.NotFound: Row(404),
    errors.Conflict: Row(409),
    errors.CallerError: Row(400),
    # Has waited in line already; the line moves, and admission bounds what repeating can do.
    errors.TooManyStarts: Row(429, retry=True),
    # Space comes back when sandboxes end, which is not a matter of seconds: the caller had better know.
    errors.NoCapacity: Row(503, retry=False),
    errors.ShuttingDown: Row(503, retry=True),
    errors.BusyError: Row(503, retry=True),
    errors.GuestUnresponsive: Row(503, retry=False, error_code="sandbox_snapshot_guest_agent_unresponsive"),
    errors.StorageFull: Row(507, retry=False),
    errors.IncompatibleSnapshot: Row(409),
    errors.HostUnsupported: Row(501),
    errors.CorruptData: Row(500),
    errors.SandboxLost: Row(500),
    errors.OperationFailed: Row(500),
    errors.AenvError: Row(500),
}


def row_of(error: errors.AenvError) -> Row:
    """The row of the error's class, or of its nearest ancestor that has one."""
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def error_response(error: errors.AenvError) -> JSONResponse:
    row = row_of(error)
    headers = {}
    if row.retry is not None:
        headers["Should-Retry"] = "true" if row.retry else "false"
    if isinstance(error, errors.BusyError):
        headers["Retry-After"] = str(error.retry_after_s)
    return plain_error(row.status, str(error), error_code=row.error_code or error.code, headers=headers)


def plain_error(
    status: int, message: str, *, error_code: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """The body of every error: `code` is the status."""
    content: dict[str, Any] = {"code": status, "message": printable(message)}
    if error_code is not None:
        content["error_code"] = error_code
    return JSONResponse(content, status_code=status, headers=headers)


def printable(text: str) -> str:
    """`text` as something UTF-8 can carry: a request may have smuggled in half a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
