"""Routes of E2B's protocol that this server does not have yet.

They are refused by name: an SDK takes the 404 of an unknown path for a sandbox or template that does not exist.
"""

from fastapi import APIRouter

from aenv.errors import InvalidRequest

_ROUTES = {
    "updating the network of a running sandbox": [("PUT", "/sandboxes/{sandbox_id}/network")],
    "sandbox metrics": [("GET", "/sandboxes/{sandbox_id}/metrics"), ("GET", "/sandboxes/metrics")],
    "sandbox logs": [("GET", "/sandboxes/{sandbox_id}/logs"), ("GET", "/v2/sandboxes/{sandbox_id}/logs")],
    "refreshing": [("POST", "/sandboxes/{sandbox_id}/refreshes")],
}

router = APIRouter(include_in_schema=False)


def _refuse(what: str) -> None:
    async def unsupported() -> None:
        raise InvalidRequest(f"{what} is not supported yet")

    for method, path in _ROUTES[what]:
        router.add_api_route(path, unsupported, methods=[method], name="unsupported")


for _what in _ROUTES:
    _refuse(_what)
