"""A node without machines: `NodeService` in memory, for tests of what stands above it."""

import asyncio
from dataclasses import dataclass, replace
from datetime import timedelta

from aenv.clock import Clock
from aenv.errors import AenvError, Conflict, NotFound
from aenv.ids import SandboxId, SnapshotId, new_sandbox_id, new_snapshot_id
from aenv.node.views import CreateRequest, NodeStats, OnTimeout, PublicState, SandboxView, SnapshotView
from aenv.testing.clock import FakeClock


@dataclass
class _Sandbox:
    view: SandboxView
    request: CreateRequest


class FakeNode:
    """States, deadlines and names as a real node has them; no guests.

    Tests steer it: `fail[operation] = error` makes the next call of that name raise, `hold[operation] = event` makes
    its calls wait for the event, and `calls` lists the operations that ended.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or FakeClock()
        self.fail: dict[str, AenvError] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []
        self.fork_errors: dict[int, AenvError] = {}
        """Errors of the next fork's children, by position."""
        self._base = self._record(("base",), source=None)
        self._snapshots: dict[SnapshotId, SnapshotView] = {self._base.id: self._base}
        self._sandboxes: dict[str, _Sandbox] = {}
        self._creates = 0
        self._create_failures = 0

    @property
    def requests(self) -> list[CreateRequest]:
        """What the living sandboxes were created with, oldest first."""
        return [sandbox.request for sandbox in self._sandboxes.values()]

    async def create(self, request: CreateRequest) -> SandboxView:
        try:
            await self._steer("create")
            return self._start(request, self._snapshot(request.template))
        except AenvError:
            self._create_failures += 1
            raise

    async def connect(self, sandbox_id: str, timeout_s: int | None) -> tuple[SandboxView, bool]:
        await self._steer("connect")
        sandbox = self._find(sandbox_id)
        ttl = timedelta(seconds=timeout_s if timeout_s is not None else sandbox.request.timeout_s)
        end_at = self.clock.now() + ttl
        resumed = sandbox.view.state is PublicState.PAUSED
        if resumed:
            sandbox.view = replace(sandbox.view, state=PublicState.RUNNING, end_at=end_at)
        elif timeout_s is not None:
            sandbox.view = replace(sandbox.view, end_at=max(end_at, sandbox.view.end_at))
        return sandbox.view, resumed

    async def pause(self, sandbox_id: str, *, require_healthy_guest: bool = False) -> None:
        await self._steer("pause with healthy guest" if require_healthy_guest else "pause")
        sandbox = self._find(sandbox_id)
        if sandbox.view.state is PublicState.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is already paused")
        sandbox.view = replace(sandbox.view, state=PublicState.PAUSED)

    async def kill(self, sandbox_id: str) -> None:
        await self._steer("kill")
        self._find(sandbox_id)
        del self._sandboxes[sandbox_id]

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        await self._steer("set_timeout")
        sandbox = self._running(sandbox_id)
        sandbox.view = replace(sandbox.view, end_at=self.clock.now() + timedelta(seconds=timeout_s))

    def get(self, sandbox_id: str) -> SandboxView:
        return self._find(sandbox_id).view

    def sandboxes(self) -> list[SandboxView]:
        self._expire()
        views = [sandbox.view for sandbox in self._sandboxes.values()]
        return sorted(views, key=lambda view: (view.started_at, view.id), reverse=True)

    async def fork(self, sandbox_id: str, count: int, timeout_s: int | None) -> list[SandboxView | AenvError]:
        await self._steer("fork")
        source = self._running(sandbox_id)
        request = replace(source.request, timeout_s=timeout_s or source.request.timeout_s)
        errors, self.fork_errors = self.fork_errors, {}
        origin = self._snapshots.get(source.view.template_id, self._base)
        return [errors[place] if place in errors else self._start(request, origin) for place in range(count)]

    async def snapshot(self, sandbox_id: str, name: str | None) -> SnapshotView:
        await self._steer("snapshot")
        source = self._running(sandbox_id)
        if name is not None and any(name in snapshot.names for snapshot in self._snapshots.values()):
            raise Conflict(f"the name {name} is taken")
        names = (name,) if name is not None else ()
        snapshot = self._record(names, source=source.view.id)
        self._snapshots[snapshot.id] = snapshot
        return snapshot

    def list_snapshots(self, *, sandbox_id: str | None = None, name: str | None = None) -> list[SnapshotView]:
        found = [
            snapshot
            for snapshot in self._snapshots.values()
            if snapshot is not self._base
            and (sandbox_id is None or snapshot.source_sandbox == sandbox_id)
            and (name is None or name in (snapshot.id, *snapshot.names))
        ]
        return found[::-1]

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._steer("delete_snapshot")
        found = self._snapshot(snapshot)
        if found is self._base:
            raise Conflict("template base is built in")
        del self._snapshots[found.id]

    def stats(self) -> NodeStats:
        states = [view.state for view in self.sandboxes()]
        return NodeStats(
            running=states.count(PublicState.RUNNING),
            paused=states.count(PublicState.PAUSED),
            starting=0,
            creates=self._creates,
            create_failures=self._create_failures,
        )

    async def _steer(self, operation: str) -> None:
        if operation in self.hold:
            await self.hold[operation].wait()
        self.calls.append(operation)
        if error := self.fail.pop(operation, None):
            raise error

    def _start(self, request: CreateRequest, snapshot: SnapshotView) -> SandboxView:
        now, sandbox_id = self.clock.now(), new_sandbox_id()
        view = SandboxView(
            id=sandbox_id,
            state=PublicState.RUNNING,
            template_id=snapshot.id,
            alias=snapshot.names[0] if snapshot.names else None,
            started_at=now,
            end_at=now + timedelta(seconds=request.timeout_s),
            metadata=request.metadata,
            envd_version="0.6.13",
            access_token=f"envd-{sandbox_id}" if request.secure else None,
            traffic_token=None if request.public_traffic else f"traffic-{sandbox_id}",
            on_timeout=request.on_timeout,
            policy=request.policy,
            vcpus=snapshot.vcpus,
            memory_mib=snapshot.memory_mib,
            disk_mib=snapshot.disk_mib,
        )
        self._sandboxes[sandbox_id] = _Sandbox(view, request)
        self._creates += 1
        return view

    def _record(self, names: tuple[str, ...], *, source: SandboxId | None) -> SnapshotView:
        return SnapshotView(
            id=new_snapshot_id(),
            names=names,
            source_sandbox=source,
            created_at=self.clock.now(),
            vcpus=2,
            memory_mib=1024,
            disk_mib=8192,
        )

    def _snapshot(self, reference: str) -> SnapshotView:
        for snapshot in self._snapshots.values():
            if reference in (snapshot.id, *snapshot.names):
                return snapshot
        raise NotFound(f"template or snapshot {reference!r} not found")

    def _find(self, sandbox_id: str) -> _Sandbox:
        self._expire()
        if sandbox_id not in self._sandboxes:
            raise NotFound(f"sandbox {sandbox_id} not found")
        return self._sandboxes[sandbox_id]

    def _running(self, sandbox_id: str) -> _Sandbox:
        sandbox = self._find(sandbox_id)
        if sandbox.view.state is PublicState.PAUSED:
            raise Conflict(f"sandbox {sandbox_id} is not running")
        return sandbox

    def _expire(self) -> None:
        now = self.clock.now()
        for sandbox_id, sandbox in list(self._sandboxes.items()):
            if sandbox.view.state is PublicState.PAUSED or sandbox.view.end_at > now:
                continue
            if sandbox.view.on_timeout is OnTimeout.KILL:
                del self._sandboxes[sandbox_id]
            else:
                sandbox.view = replace(sandbox.view, state=PublicState.PAUSED)
