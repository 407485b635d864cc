"""Routes that need no key."""

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from aenv.api.context import Api

router = APIRouter(tags=["system"])


@router.get("/health", status_code=204)
async def health() -> None:
    """The control plane answers."""


@router.get("/metrics")
async def metrics(api: Api) -> Response:
    """Prometheus text."""
    return Response(api.metrics.text(), media_type=CONTENT_TYPE_LATEST)
