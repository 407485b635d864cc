"""Routes of snapshots."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from aenv.api import convert, listing, wire
from aenv.api.context import Api
from aenv.node.views import SnapshotView

router = APIRouter(tags=["snapshots"])


@router.get("/snapshots", response_model_exclude_none=True)
async def list_snapshots(
    *,
    api: Api,
    response: Response,
    sandbox: Annotated[str | None, Query(alias="sandboxID")] = None,
    name: Annotated[str | None, Query(max_length=256)] = None,
    limit: Annotated[int | None, Query(ge=1, le=listing.MAX_PAGE)] = None,
    next_token: Annotated[str | None, Query(alias="nextToken", max_length=1024)] = None,
) -> list[wire.Snapshot]:
    """Snapshots, newest first, in pages of at most 100; of one sandbox, or by name or id."""
    views = api.node.list_snapshots(
        sandbox_id=convert.sandbox_id(sandbox) if sandbox else None, name=convert.reference(name) if name else None
    )
    chosen, following = listing.page(views, _place, limit=limit, token=next_token)
    if following:
        response.headers[listing.NEXT_TOKEN] = following
    return [convert.snapshot(view) for view in chosen]


def _place(view: SnapshotView) -> listing.Place:
    return view.created_at, view.id


@router.delete("/templates/{template_id:path}", status_code=204)
async def delete_template(template_id: str, api: Api) -> None:
    """A template or a snapshot, by id or name. Sandboxes started from it go on."""
    await api.finish(api.node.delete_snapshot(convert.reference(template_id)), name="delete snapshot")
