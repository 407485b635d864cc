"""The app: routes, error answers, middleware."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from aenv import __version__
from aenv.aiokit import TaskSet
from aenv.api import sandboxes, snapshots, system, unsupported
from aenv.api.context import Context
from aenv.api.errors import error_response, plain_error
from aenv.api.idempotency import IdempotentCreates
from aenv.api.metrics import Metrics
from aenv.api.middleware import Authenticated, BoundedBody, Observed
from aenv.clock import Clock, SystemClock
from aenv.errors import AenvError
from aenv.node.service import NodeService
from aenv.settings import Settings

_SHOWN_PROBLEMS = 5


def create_app(node: NodeService, *, settings: Settings, api_key: str, clock: Clock | None = None) -> FastAPI:
    """The control plane of `node` as an ASGI app.

    It starts nothing at start-up and needs no lifespan. Work whose client has left goes on in
    `app.state.context.tasks`; who stops the node lets it end, or closes that set.
    """
    tasks = TaskSet("api")
    metrics = Metrics(node)
    app = FastAPI(
        title="AENV",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            AenvError: _on_aenv_error,
            RequestValidationError: _on_invalid_request,
            HTTPException: _on_http_exception,
        },
    )
    app.state.context = Context(
        node=node,
        settings=settings,
        tasks=tasks,
        creates=IdempotentCreates(tasks, clock or SystemClock()),
        metrics=metrics,
    )
    # The one added last is the outermost.
    app.add_middleware(BoundedBody, max_bytes=settings.max_body_mib * 2**20)
    app.add_middleware(Authenticated, api_key=api_key)
    app.add_middleware(Observed, metrics=metrics)
    for module in (system, unsupported, sandboxes, snapshots):
        app.include_router(module.router)
    return app


async def _on_aenv_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AenvError)
    return error_response(error)


async def _on_invalid_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_problem(problem) for problem in error.errors()]
    more = [f"and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
    return plain_error(400, "; ".join(problems[:_SHOWN_PROBLEMS] + more), error_code="invalid_request")


def _problem(problem: Mapping[str, Any]) -> str:
    """`where: what`, without the value, which may be large, secret or not printable."""
    place: Sequence[object] = problem["loc"]
    if problem["type"] == "json_invalid":
        return f"body: not valid JSON: {problem.get('ctx', {}).get('error', 'syntax error')}"
    where = ".".join(str(part)[:64] for part in place[1:]) or str(place[0])
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"no such path: {request.method} {request.url.path}"
    elif error.status_code == 405:
        message = f"method not allowed: {request.method} {request.url.path}"
    return plain_error(error.status_code, message, headers=dict(error.headers or {}))
