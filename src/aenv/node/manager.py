"""The sandboxes of this node: who there is, how one comes into being, and what a restarted server finds.

Implements `NodeService`. Each sandbox decides for itself (node/sandbox.py); here is only what concerns several.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from aenv.errors import AenvError, Conflict, CorruptData, InvalidRequest, NotFound, SandboxLost, ShuttingDown
from aenv.ids import SandboxId, new_sandbox_id
from aenv.lifecycle.events import Request
from aenv.lifecycle.machine import Lifecycle
from aenv.lifecycle.recovery import recover
from aenv.lifecycle.states import State
from aenv.lifecycle.table import BEGIN, Step
from aenv.node.durability import make_durable, not_durable
from aenv.node.front_door import Route
from aenv.node.record import SandboxRecord
from aenv.node.sandbox import Sandbox
from aenv.node.services import Services
from aenv.node.ticket import Origin, Ticket, origin_of
from aenv.node.views import CreateRequest, NodeStats, OnTimeout, PublicState, SandboxView, SnapshotView
from aenv.snapshots.records import Kind, SnapshotRecord

log = structlog.get_logger(__name__)

MAX_FORKS = 100
_REMEMBERED = 10_000
_STOP_ATTEMPTS = 3


class SandboxManager:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._sandboxes: dict[SandboxId, Sandbox] = {}
        self._lost: OrderedDict[SandboxId, AenvError] = OrderedDict()
        self._builtin: SnapshotRecord | None = None
        self._stopping = False

    # reading

    def get(self, sandbox_id: str) -> SandboxView:
        view = self._find(sandbox_id).view()
        if view is None:
            raise NotFound(f"sandbox {sandbox_id} not found")
        return view

    def sandboxes(self) -> list[SandboxView]:
        views = [view for sandbox in self._sandboxes.values() if (view := sandbox.view()) is not None]
        return sorted(views, key=lambda view: (view.started_at, view.id), reverse=True)

    def stats(self) -> NodeStats:
        counters = self._services.counters
        states = [view.state for view in self.sandboxes()]
        return NodeStats(
            running=states.count(PublicState.RUNNING),
            paused=states.count(PublicState.PAUSED),
            starting=counters.starting,
            creates=counters.creates,
            create_failures=counters.create_failures,
            warm=self._services.warm_pool.ready,
        )

    def _find(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.get(SandboxId(sandbox_id))
        if sandbox is None:
            lost = self._lost.get(SandboxId(sandbox_id))
            raise NotFound(f"sandbox {sandbox_id} not found" + (f": {lost.message}" if lost else ""))
        return sandbox

    # sandboxes

    async def create(self, request: CreateRequest) -> SandboxView:
        services = self._services
        snapshot = services.snapshots.find(request.template)
        origin = origin_of(snapshot, services.snapshots.state(snapshot), warm=True)
        now = services.clock.now()
        record = SandboxRecord(
            id=new_sandbox_id(),
            lifecycle=Lifecycle(),
            template_id=snapshot.id,
            alias=snapshot.names[0] if snapshot.names else None,
            shape=origin.shape,
            envd_version=snapshot.envd_version,
            created_at=now,
            started_at=now,
            end_at=now,
            timeout_s=request.timeout_s,
            on_timeout=request.on_timeout,
            secure=request.secure,
            public_traffic=request.public_traffic,
            policy=request.policy,
            metadata=request.metadata,
            env={**snapshot.env, **request.env},
        )
        return await self._begin(record, origin)

    async def _begin(self, record: SandboxRecord, origin: Origin, *, patient: bool = False) -> SandboxView:
        """Start a sandbox in a task of its own, so that it comes to an end whether or not anybody waits.

        A patient one waits for its turn as long as it takes: a fork's children, whose request was admitted as a whole.
        """
        services = self._services
        self._require_open()
        # From here on, lest what it starts from is deleted while it waits for its turn.
        services.layers.hold(record.id, [*origin.capture.disk_layers, *origin.capture.memory_layers])
        return await services.tasks.shielded(self._start(record, origin, patient), name=f"start {record.id}")

    def _require_open(self) -> None:
        if self._stopping:
            raise ShuttingDown("this node is shutting down")

    async def _start(self, record: SandboxRecord, origin: Origin, patient: bool) -> SandboxView:
        counters = self._services.counters
        counters.starting += 1
        sandbox = None
        try:
            async with self._services.starts.admitted(patient=patient):
                self._require_open()
                sandbox = Sandbox(record, self._services, origin=origin, on_gone=self._gone)
                self._sandboxes[sandbox.id] = sandbox
                await self._run(sandbox, BEGIN, Ticket(Request.CONNECT))
            counters.creates += 1
        except BaseException:
            counters.create_failures += 1
            if sandbox is None:
                self._services.layers.release(record.id)
            raise
        finally:
            counters.starting -= 1
        return self.get(record.id)

    async def _run(self, sandbox: Sandbox, first: Step, ticket: Ticket) -> None:
        """Give a sandbox its task; return when its first step is answered."""
        ticket.future = asyncio.get_running_loop().create_future()
        self._services.tasks.spawn(sandbox.run(first, ticket), name=f"sandbox-{sandbox.id}")
        answered = await asyncio.shield(ticket.future)
        if answered.error is not None:
            raise answered.error

    def _gone(self, sandbox: Sandbox, lost: AenvError | None) -> None:
        self._sandboxes.pop(sandbox.id, None)
        if lost is not None:
            self._lost[sandbox.id] = lost
            while len(self._lost) > _REMEMBERED:
                self._lost.popitem(last=False)

    async def connect(self, sandbox_id: str, timeout_s: int | None) -> tuple[SandboxView, bool]:
        if self._stopping:
            raise ShuttingDown("this node is shutting down")
        sandbox = self._find(sandbox_id)
        self._require_open()
        answered = await sandbox.ask(Ticket(Request.CONNECT, timeout_s=timeout_s))
        return self.get(sandbox_id), answered.resumed

    async def pause(self, sandbox_id: str, *, require_healthy_guest: bool = False) -> None:
        await self._find(sandbox_id).ask(Ticket(Request.PAUSE, require_healthy_guest=require_healthy_guest))

    async def kill(self, sandbox_id: str) -> None:
        await self._find(sandbox_id).ask(Ticket(Request.KILL))

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        await self._find(sandbox_id).ask(Ticket(Request.SET_TIMEOUT, timeout_s=timeout_s))

    def expired(self, sandbox_id: SandboxId) -> None:
        """For `Deadlines`."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            pause = sandbox.record.on_timeout is OnTimeout.PAUSE
            sandbox.tell(Ticket(Request.EXPIRE_PAUSE if pause else Request.EXPIRE_KILL))

    async def fork(self, sandbox_id: str, count: int, timeout_s: int | None) -> list[SandboxView | AenvError]:
        if not 1 <= count <= MAX_FORKS:
            raise InvalidRequest(f"count must be 1 to {MAX_FORKS}, not {count}")
        source = self._find(sandbox_id)
        work = self._fork(source, count, timeout_s)
        return await self._services.tasks.shielded(work, name=f"fork {source.id}")

    async def _fork(self, source: Sandbox, count: int, timeout_s: int | None) -> list[SandboxView | AenvError]:
        ticket = Ticket(Request.FORK)
        with self._released(ticket):
            await source.ask(ticket)
            assert ticket.capture is not None
            origin = Origin(source.record.shape, ticket.capture)
            children = [self._child(source.record, timeout_s) for _ in range(count)]
            results = await asyncio.gather(
                *(self._begin(child, origin, patient=True) for child in children), return_exceptions=True
            )
        unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, AenvError)]
        if unexpected:
            raise unexpected[0]
        return [result for result in results if not isinstance(result, BaseException) or isinstance(result, AenvError)]

    def _child(self, source: SandboxRecord, timeout_s: int | None) -> SandboxRecord:
        now = self._services.clock.now()
        return replace(
            source,
            id=new_sandbox_id(),
            lifecycle=Lifecycle(),
            created_at=now,
            started_at=now,
            end_at=now,
            timeout_s=source.timeout_s if timeout_s is None else timeout_s,
            metadata=dict(source.metadata),
            env=dict(source.env),
            paused_as=None,
            machine=None,
            guest_unresponsive_at_pause=False,
        )

    # snapshots

    async def snapshot(self, sandbox_id: str, name: str | None) -> SnapshotView:
        sandbox = self._find(sandbox_id)
        if name is not None:
            self._services.snapshots.check_name(name)
        ticket = Ticket(Request.SNAPSHOT, snapshot_name=name)
        return await self._services.tasks.shielded(self._snapshot(sandbox, ticket), name=f"snapshot {sandbox.id}")

    async def _snapshot(self, sandbox: Sandbox, ticket: Ticket) -> SnapshotView:
        with self._released(ticket):
            await sandbox.ask(ticket)
        assert ticket.snapshot is not None
        return _snapshot_view(ticket.snapshot)

    @contextmanager
    def _released(self, ticket: Ticket) -> Iterator[None]:
        """Release the layers of a capture in the end. Not when this server is cut short, though: a VM that goes on may
        stand on them by then, and only the next start can tell.
        """
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._services.layers.release(ticket.holder)
            raise
        self._services.layers.release(ticket.holder)

    def list_snapshots(self, *, sandbox_id: str | None = None, name: str | None = None) -> list[SnapshotView]:
        return [
            _snapshot_view(record)
            for record in self._services.snapshots.all(Kind.SNAPSHOT)
            if (sandbox_id is None or record.source_sandbox == sandbox_id) and (name is None or name in record.names)
        ]

    async def delete_snapshot(self, snapshot: str) -> None:
        record = self._services.snapshots.find(snapshot)
        if self._builtin is not None and record.id == self._builtin.id:
            raise Conflict(f"template '{snapshot}' is built in", hint="it is made again at the next start anyway")
        await self._services.tasks.shielded(self._services.snapshots.delete(record.id), name=f"delete {record.id}")

    # starting and stopping the node

    def serve(self, builtin: SnapshotRecord) -> None:
        """From here on creates are possible."""
        self._builtin = builtin

    async def recover(self) -> None:
        """Take over what an earlier server process left: adopt, clean, go on. Call it once, before anything else."""
        services = self._services
        records: list[SandboxRecord] = []
        steps: list[tuple[Step, Ticket]] = []
        rows = await services.database.read("SELECT id, record FROM sandboxes")
        for row in rows:
            try:
                record = SandboxRecord.from_json(json.loads(row["record"]))
            except (CorruptData, ValueError) as error:
                log.error("sandbox record cannot be read; left as it is", sandbox=row["id"], error=str(error))
                continue
            records.append(record)
            steps.append(await self._take_over(record))
        # Routes to what is about to be freed go first.
        await services.front_door.sync(self._routes())
        freed = await services.machines.sweep([s.machine for s in self._sandboxes.values() if s.machine is not None])
        if freed:
            log.info("swept what an earlier run left", things=freed)
        await self._sweep_pauses({row["id"] for row in rows}, records)
        for snapshot in not_durable(services):
            services.tasks.spawn(make_durable(services, snapshot), name=f"sync-{snapshot.id}")
        sandboxes = list(self._sandboxes.values())
        for sandbox, (step, ticket) in zip(sandboxes, steps, strict=True):
            services.tasks.spawn(sandbox.run(step, ticket), name=f"sandbox-{sandbox.id}")
        await asyncio.gather(*(sandbox.at_rest() for sandbox in sandboxes))
        if services.snapshots.all_readable:
            services.layers.sweep()
        else:
            log.warning("layers that nobody holds are not removed while a snapshot record cannot be read")

    async def _sweep_pauses(self, sandboxes: set[SandboxId], records: list[SandboxRecord]) -> None:
        """Delete captures of pauses that no sandbox names: it went on, or went, and they could not be deleted then."""
        named = {record.paused_as for record in records}
        readable = {record.id for record in records}
        for pause in self._services.snapshots.all(Kind.PAUSE):
            source = pause.source_sandbox
            if pause.id not in named and (source in readable or source not in sandboxes):
                await self._services.snapshots.delete(pause.id)

    async def _take_over(self, record: SandboxRecord) -> tuple[Step, Ticket]:
        """Adopt the sandbox and its machine, if there is one. Returns its first step."""
        services = self._services
        sandbox = Sandbox(record, services, on_gone=self._gone)
        self._sandboxes[sandbox.id] = sandbox
        lost = SandboxLost("it was lost while the node was down")
        if record.machine is not None and record.lifecycle.state is State.RUNNING:
            try:
                sandbox.adopted(await services.machines.adopt(record.id, record.machine))
            except SandboxLost as error:
                log.warning("sandbox lost", sandbox=record.id, reason=error.message)
                lost = SandboxLost(f"its VM was lost while the node was down: {error.message}")
        committed = record.paused_as is not None and services.snapshots.exists(record.paused_as)
        step = recover(record.lifecycle.state, vm_alive=sandbox.machine is not None, capture_committed=committed)
        return step, Ticket(Request.CONNECT, error=lost if step.next is State.FAILED else None)

    def _routes(self) -> dict[SandboxId, Route]:
        return {s.id: route for s in self._sandboxes.values() if (route := s.route) is not None}

    async def stop(self, *, keep_running: bool) -> None:
        """Begin nothing more; pause what runs, unless it is to be left running. Returns when nothing is under way and
        what was captured is on stable storage.
        """
        self._stopping = True
        sandboxes = list(self._sandboxes.values())
        if not keep_running:
            places = asyncio.Semaphore(self._services.starts.limit)
            await asyncio.gather(*(self._pause_to_stop(sandbox, places) for sandbox in sandboxes))
        await asyncio.gather(*(sandbox.at_rest() for sandbox in sandboxes))
        await asyncio.gather(*(make_durable(self._services, snapshot) for snapshot in not_durable(self._services)))

    async def let_go(self) -> None:
        """After `stop` and the end of all tasks: leave the VMs that still run to the next server."""
        for sandbox in self._sandboxes.values():
            if sandbox.machine is not None:
                await sandbox.machine.vm.detach()

    async def _pause_to_stop(self, sandbox: Sandbox, places: asyncio.Semaphore) -> None:
        for _ in range(_STOP_ATTEMPTS):
            try:
                async with places:
                    await sandbox.ask(Ticket(Request.PAUSE))
                return
            except (NotFound, Conflict):  # it is gone, or paused
                return
            except AenvError as error:
                log.error("could not be paused at the stop of the node", sandbox=sandbox.id, error=str(error))


def _snapshot_view(record: SnapshotRecord) -> SnapshotView:
    return SnapshotView(
        id=record.id,
        names=record.names,
        source_sandbox=record.source_sandbox,
        created_at=record.created_at,
        vcpus=record.vcpus,
        memory_mib=record.memory_mib,
        disk_mib=record.disk_mib,
    )
