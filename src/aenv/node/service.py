"""The calls api/ makes on the node. The sandbox manager implements them; testing/ has an in-memory one for the API's
own tests.

No call is cancelled by a client that hangs up: the work goes on, and only the answer is lost.
"""

from typing import Protocol

from aenv.errors import AenvError
from aenv.node.views import CreateRequest, NodeStats, SandboxView, SnapshotView


class NodeService(Protocol):
    async def create(self, request: CreateRequest) -> SandboxView:
        """Raises: NotFound (template), InvalidRequest, BusyError, IncompatibleSnapshot, CorruptData, StorageFull,
        OperationFailed; nothing is left then.
        """

    async def connect(self, sandbox_id: str, timeout_s: int | None) -> tuple[SandboxView, bool]:
        """Resume if paused (True), else extend the deadline if `timeout_s` from now is later (never shorten). Raises:
        NotFound, BusyError.
        """

    async def pause(self, sandbox_id: str, *, require_healthy_guest: bool = False) -> None:
        """Raises: NotFound; Conflict when already paused; GuestUnresponsive (only with require_healthy_guest),
        StorageFull, OperationFailed: it runs on.
        """

    async def kill(self, sandbox_id: str) -> None:
        """Raises: NotFound."""

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """The deadline becomes now + `timeout_s`; 0 expires it now. Raises: NotFound; Conflict when paused."""

    def get(self, sandbox_id: str) -> SandboxView:
        """Raises: NotFound."""

    def sandboxes(self) -> list[SandboxView]:
        """All running and paused, newest first."""

    async def fork(self, sandbox_id: str, count: int, timeout_s: int | None) -> list[SandboxView | AenvError]:
        """One capture, `count` children, each a sandbox or its own error. The source runs on. Raises: NotFound,
        Conflict, OperationFailed.
        """

    async def snapshot(self, sandbox_id: str, name: str | None) -> SnapshotView:
        """The source runs on. Raises: NotFound, Conflict (state, or name taken), StorageFull, OperationFailed."""

    def list_snapshots(self, *, sandbox_id: str | None = None, name: str | None = None) -> list[SnapshotView]:
        """Persistent snapshots (no templates, no pauses), newest first."""

    async def delete_snapshot(self, snapshot: str) -> None:
        """By id or name, template or snapshot. Sandboxes started from it go on. Raises: NotFound; Conflict for the
        built-in template.
        """

    def stats(self) -> NodeStats: ...
