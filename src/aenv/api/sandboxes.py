"""Routes of sandboxes."""

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from aenv.api import convert, listing, wire
from aenv.api.context import Api
from aenv.api.middleware import SANDBOX
from aenv.errors import Conflict, InvalidRequest
from aenv.node.views import OnTimeout, PublicState, SandboxView

router = APIRouter(tags=["sandboxes"])


async def _id(sandbox_id: Annotated[str, Path()]) -> str:
    return convert.sandbox_id(sandbox_id)


SandboxId = Annotated[str, Depends(_id)]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]


async def _create(body: wire.NewSandboxV2, api: Api, request: Request, idempotency_key: str | None) -> wire.Sandbox:
    wanted = convert.create_request(body, api.settings)
    work = api.node.create(wanted)
    if idempotency_key is None:
        view = await api.finish(work, name="create")
    else:
        view = await api.creates.create(idempotency_key, wanted, work)
    request.scope[SANDBOX] = view.id
    return convert.sandbox(view, api.settings)


@router.post("/v2/sandboxes", status_code=201, response_model_exclude_none=True)
async def create_sandbox(
    body: wire.NewSandboxV2, api: Api, request: Request, idempotency_key: IdempotencyKey = None
) -> wire.Sandbox:
    """Start a sandbox, always with an access token."""
    return await _create(body, api, request, idempotency_key)


@router.post("/sandboxes", status_code=201, response_model_exclude_none=True)
async def create_sandbox_v1(
    body: wire.NewSandbox, api: Api, request: Request, idempotency_key: IdempotencyKey = None
) -> wire.Sandbox:
    """Start a sandbox; `secure: false` leaves out the access token."""
    return await _create(body, api, request, idempotency_key)


@router.get("/sandboxes", response_model_exclude_none=True)
async def list_sandboxes_v1(api: Api, metadata: str | None = None) -> list[wire.ListedSandbox]:
    """Running sandboxes, newest first."""
    wanted = listing.metadata_filter(metadata)
    views = [view for view in api.node.sandboxes() if view.state is PublicState.RUNNING and listing.has(view, wanted)]
    return [convert.listed(view) for view in views]


@router.get("/v2/sandboxes", response_model_exclude_none=True)
async def list_sandboxes(
    *,
    api: Api,
    response: Response,
    metadata: str | None = None,
    state: str | None = None,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
    started_after: Annotated[str | None, Query(alias="startedAfter")] = None,
    template: str | None = None,
    limit: Annotated[int | None, Query(ge=1, le=listing.MAX_PAGE)] = None,
    next_token: Annotated[str | None, Query(alias="nextToken", max_length=1024)] = None,
) -> list[wire.ListedSandbox]:
    """Running and paused sandboxes, newest first, in pages of at most 100."""
    wanted, states = listing.metadata_filter(metadata), listing.state_filter(state)
    since = listing.instant("startedAfter", started_after) if started_after else None
    views = [
        view
        for view in api.node.sandboxes()
        if view.state in states
        and listing.has(view, wanted)
        and (since is None or view.started_at >= since)
        and (not template or template in (view.template_id, view.alias))
    ]
    chosen, following = listing.page(views, _place, ascending=order == "asc", limit=limit, token=next_token)
    if following:
        response.headers[listing.NEXT_TOKEN] = following
    return [convert.listed(view) for view in chosen]


def _place(view: SandboxView) -> listing.Place:
    return view.started_at, view.id


@router.get("/sandboxes/{sandbox_id}", response_model_exclude_none=True)
async def get_sandbox(sandbox_id: SandboxId, api: Api) -> wire.SandboxDetail:
    return convert.detail(api.node.get(sandbox_id), api.settings)


@router.delete("/sandboxes/{sandbox_id}", status_code=204)
async def kill_sandbox(sandbox_id: SandboxId, api: Api) -> None:
    await api.finish(api.node.kill(sandbox_id), name=f"kill {sandbox_id}")


async def _connect(sandbox_id: str, timeout_s: int | None, api: Api, response: Response) -> wire.Sandbox:
    view, resumed = await api.finish(api.node.connect(sandbox_id, timeout_s), name=f"connect {sandbox_id}")
    response.status_code = 201 if resumed else 200
    return convert.sandbox(view, api.settings)


@router.post("/v2/sandboxes/{sandbox_id}/connect", response_model_exclude_none=True)
async def connect_sandbox(
    sandbox_id: SandboxId, api: Api, response: Response, body: wire.ConnectV2 | None = None
) -> wire.Sandbox:
    """Resume a paused sandbox (201), extend a running one (200)."""
    return await _connect(sandbox_id, body.timeout if body else None, api, response)


@router.post("/sandboxes/{sandbox_id}/connect", response_model_exclude_none=True)
async def connect_sandbox_v1(sandbox_id: SandboxId, api: Api, response: Response, body: wire.Connect) -> wire.Sandbox:
    """Resume a paused sandbox (201), extend a running one (200)."""
    return await _connect(sandbox_id, body.timeout, api, response)


@router.post("/sandboxes/{sandbox_id}/resume", status_code=201, response_model_exclude_none=True)
async def resume_sandbox(sandbox_id: SandboxId, api: Api, body: wire.Resume | None = None) -> wire.Sandbox:
    """Resume a paused sandbox; 409 when it is running."""
    asked = body or wire.Resume()
    before = api.node.get(sandbox_id)
    if asked.auto_pause is not None and asked.auto_pause != (before.on_timeout is OnTimeout.PAUSE):
        raise InvalidRequest("autoPause: changing it at a resume is not supported yet")
    running = Conflict(f"sandbox {sandbox_id} is already running")
    if before.state is PublicState.RUNNING:
        raise running
    view, resumed = await api.finish(api.node.connect(sandbox_id, asked.timeout), name=f"resume {sandbox_id}")
    if not resumed:
        raise running
    return convert.sandbox(view, api.settings)


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204)
async def pause_sandbox(sandbox_id: SandboxId, api: Api, body: wire.Pause | None = None) -> None:
    healthy = bool(body and body.require_healthy_guest)
    await api.finish(api.node.pause(sandbox_id, require_healthy_guest=healthy), name=f"pause {sandbox_id}")


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
async def set_timeout(sandbox_id: SandboxId, api: Api, body: wire.Timeout) -> None:
    """The deadline becomes now + `timeout`; 0 expires the sandbox now."""
    await api.finish(api.node.set_timeout(sandbox_id, body.timeout), name=f"set timeout {sandbox_id}")


@router.post("/sandboxes/{sandbox_id}/fork", status_code=201, response_model_exclude_none=True)
async def fork_sandbox(sandbox_id: SandboxId, api: Api, body: wire.Fork | None = None) -> list[wire.ForkResult]:
    """Copy a running sandbox; each child is a sandbox or its own error."""
    asked = body or wire.Fork()
    children = await api.finish(api.node.fork(sandbox_id, asked.count or 1, asked.timeout), name=f"fork {sandbox_id}")
    return [convert.fork_result(child, api.settings) for child in children]


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201, response_model_exclude_none=True)
async def create_snapshot(sandbox_id: SandboxId, api: Api, body: wire.NewSnapshot | None = None) -> wire.Snapshot:
    """Keep the sandbox as it is now; it goes on."""
    name = body.name if body else None
    view = await api.finish(api.node.snapshot(sandbox_id, name), name=f"snapshot {sandbox_id}")
    return convert.snapshot(view)
