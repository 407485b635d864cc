"""What happens to every request before and after its route. Plain ASGI: nothing here buffers or cancels an answer.

From outside in: `Observed` (log, metrics, last resort for defects), `Authenticated`, `BoundedBody`.
"""

import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv.api.errors import plain_error
from aenv.api.keys import matches
from aenv.api.metrics import Metrics

_log = structlog.get_logger(__name__)

OPEN_PATHS = frozenset({"/health", "/metrics"})
SANDBOX = "aenv.sandbox"
"""Key in the scope under which a route may leave the id of the sandbox it was about."""


class Observed:
    """One log line and one measurement a request. A defect is logged with its traceback and told as 500, without."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            _log.exception("request failed by a defect", operation=_operation(scope), **_sandbox(scope))
            if status:
                raise  # Half an answer is out: only a cut connection can tell.
            await plain_error(500, "internal error", error_code="internal")(scope, receive, watch)
        duration_s = time.monotonic() - began_s
        self._metrics.observe(_operation(scope), status, duration_s)
        if scope["path"] not in OPEN_PATHS:
            _log.info(
                "request",
                operation=_operation(scope),
                **_sandbox(scope),
                status=status,
                duration_s=round(duration_s, 4),
            )


class Authenticated:
    """Exactly one `X-API-Key`, and the right one, on everything but OPEN_PATHS."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = [value for name, value in scope["headers"] if name == b"x-api-key"]
            if len(given) != 1 or not matches(given[0], self._api_key):
                message = "missing API key: send X-API-Key" if not given else "invalid API key"
                await plain_error(401, message, error_code="unauthenticated")(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BoundedBody:
    """Takes the body in whole, refuses one that is too large or not JSON, and hands it on as JSON.

    A body without a content type is taken for JSON; an empty body is none, whatever its type.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await self._too_large()(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return  # Hung up while sending: nobody to answer.
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._too_large()(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if body and kind not in (b"", b"application/json"):
            refusal = plain_error(415, "the body must be JSON: send Content-Type: application/json")
            await refusal(scope, receive, send)
            return
        scope["headers"] = [
            *((name, value) for name, value in scope["headers"] if name != b"content-type"),
            (b"content-type", b"application/json"),
        ]
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)

    def _too_large(self) -> ASGIApp:
        return plain_error(413, f"the body is larger than {self._max_bytes} bytes")


def _operation(scope: Scope) -> str:
    """The route's name: a bounded set, unlike paths."""
    return getattr(scope.get("route"), "name", None) or "unknown"


def _sandbox(scope: Scope) -> dict[str, str]:
    sandbox = scope.get(SANDBOX) or scope.get("path_params", {}).get("sandbox_id")
    return {"sandbox": sandbox[:64]} if sandbox else {}
