"""One sandbox: a task, a queue, and the actions of the lifecycle table carried out in order.

The table (aenv.lifecycle) decides; this module does. Requests are read one at a time, between steps, so a sandbox never does two things at once and
whoever waits need not hold the caller's connection: an answer that nobody takes is dropped, the work is not.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import structlog

from aenv.errors import AenvError, Conflict, InvalidRequest, NotFound, OperationFailed, SandboxLost
from aenv.ids import MachineId, SandboxId, new_snapshot_id
from aenv.lifecycle.events import FALLIBLE, WORK, Action, Event, Outcome, Reason, Request
from aenv.lifecycle.machine import Lifecycle
from aenv.lifecycle.states import TERMINAL, State, public_state
from aenv.lifecycle.table import BEGIN, Decision, Deny, Ignore, Satisfied, Step, Wait
from aenv.node.front_door import Route
from aenv.node.identity import init_request
from aenv.node.machine import Capture, Machine, Shape
from aenv.node.record import SandboxRecord
from aenv.node.services import Services
from aenv.node.views import NetworkPolicy, OnTimeout, PublicState, SandboxView
from aenv.snapshots.records import Kind, SnapshotRecord

log = structlog.get_logger(__name__)

RETRY_INTERVAL_S = 60
"""After a pause at the deadline failed: when it is tried again."""


@dataclass(frozen=True)
class Origin:
    """What a sandbox starts from: a snapshot record, or a capture that is none (a fork's)."""

    shape: Shape
    capture: Capture
    warm: bool = False
    """A machine of the warm pool may be taken instead of a restore."""


@dataclass
class Ticket:
    """A request in the queue, with its arguments and where its answer goes. Without a future nobody waits."""

    event: Event
    future: asyncio.Future["Ticket"] | None = None
    timeout_s: int | None = None
    require_healthy_guest: bool = False
    snapshot_name: str | None = None
    machine: MachineId | None = None
    """For news of a VM: which."""
    # the answer
    resumed: bool = False
    snapshot: SnapshotRecord | None = None
    capture: Capture | None = None
    holder: str = ""
    """Who holds the capture's layers; the asker releases it."""
    error: AenvError | None = field(default=None, repr=False)


class Sandbox:
    """State after any call: what `view` says. `on_gone` is called once everything is freed, with the error that ended it, if any."""

    def __init__(
        self,
        record: SandboxRecord,
        services: Services,
        *,
        origin: Origin | None = None,
        on_gone: Callable[["Sandbox", AenvError | None], None],
    ) -> None:
        self.record = record
        self._services = services
        self._origin = origin
        self._on_gone = on_gone
        self._machine: Machine | None = None
        self._capture: Capture | None = None
        self._queue: asyncio.Queue[Ticket] = asyncio.Queue()
        self._lost: AenvError | None = None
        self._memory_counted = False
        self._actions: dict[Action, Callable[[Ticket, Step | None], Awaitable[Outcome | None]]] = {
            Action.LAUNCH: self._launch,
            Action.RESTORE: self._restore,
            Action.CAPTURE_AND_STAY: self._capture_and_stay,
            Action.CAPTURE_AND_GO_ON: self._capture_and_go_on,
            Action.RELEASE_ALL: self._release_all,
            Action.PERSIST: self._persist,
            Action.ADOPT: self._adopt,
            Action.ROLL_BACK: self._roll_back,
            Action.THAW: self._thaw,
            Action.PUBLISH_ROUTE: self._publish_route,
            Action.WITHDRAW_ROUTE: self._withdraw_route,
            Action.SET_DEADLINE: self._set_deadline,
            Action.EXTEND_DEADLINE: self._extend_deadline,
            Action.POSTPONE_DEADLINE: self._postpone_deadline,
            Action.ARM_DEADLINE: self._arm_deadline,
            Action.DISARM_DEADLINE: self._disarm_deadline,
            Action.RELEASE_VM: self._release_vm,
            Action.DROP_CAPTURE: self._drop_capture,
            Action.FORGET: self._forget,
            Action.ANSWER: self._answer,
            Action.ANSWER_FAILURE: self._answer_failure,
        }

    # asking

    @property
    def id(self) -> SandboxId:
        return self.record.id

    @property
    def state(self) -> State:
        return self.record.lifecycle.state

    @property
    def route(self) -> Route | None:
        """The route edge should hold; None while there is none to the VM."""
        if self._machine is None or public_state(self.state) is None:
            return None
        record, tokens = self.record, self._services.tokens
        return Route(
            generation=record.lifecycle.route_generation,
            address=self._machine.slot.host_address,
            access_token=tokens.envd(record.id) if record.secure else None,
            traffic_token=None if record.public_traffic else tokens.traffic(record.id),
        )

    @property
    def machine(self) -> Machine | None:
        return self._machine

    def view(self) -> SandboxView | None:
        """None when there is no such sandbox to the outside (not yet, or not any more)."""
        state = public_state(self.state)
        if state is None:
            return None
        record, tokens = self.record, self._services.tokens
        return SandboxView(
            id=record.id,
            state=PublicState(state),
            template_id=record.template_id,
            alias=record.alias,
            started_at=record.started_at,
            end_at=record.end_at,
            vcpus=record.shape.vcpus,
            memory_mib=record.shape.memory_mib,
            disk_mib=record.shape.disk_mib,
            metadata=record.metadata,
            envd_version=record.envd_version,
            access_token=tokens.envd(record.id) if record.secure else None,
            traffic_token=None if record.public_traffic else tokens.traffic(record.id),
            on_timeout=record.on_timeout,
            policy=record.policy,
            guest_unresponsive_at_pause=record.guest_unresponsive_at_pause,
        )

    async def ask(self, ticket: Ticket) -> Ticket:
        """Queue a request and wait for its answer. Cancelling the wait does not cancel the request. Raises: the ticket's error."""
        ticket.future = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(ticket)
        answered = await asyncio.shield(ticket.future)
        if answered.error is not None:
            raise answered.error
        return answered

    def tell(self, ticket: Ticket) -> None:
        """Queue what nobody waits for."""
        self._queue.put_nowait(ticket)

    # deciding

    async def run(self, first: Step = BEGIN, ticket: Ticket | None = None) -> None:
        """The sandbox's task: take `first`, then serve the queue until everything is freed."""
        await self._take(first, ticket or Ticket(Request.CONNECT))
        while self.state not in TERMINAL:
            waiting = await self._queue.get()
            if self._overtaken(waiting):
                continue
            await self._feed(waiting.event, waiting)
        self._on_gone(self, self._lost)
        while not self._queue.empty():
            await self._feed_denied(self._queue.get_nowait())

    def _overtaken(self, ticket: Ticket) -> bool:
        """News of another VM than the one that serves, or an expiry after the deadline was moved."""
        if ticket.machine is not None:
            return self._machine is None or self._machine.id != ticket.machine
        if ticket.event in (Request.EXPIRE_PAUSE, Request.EXPIRE_KILL):
            return self.record.end_at > self._services.clock.now()
        return False

    async def _feed_denied(self, ticket: Ticket) -> None:
        if ticket.event is Request.KILL and self._lost is None and ticket.future is not None:
            ticket.error = NotFound(f"sandbox {self.id} not found")
        elif isinstance(ticket.event, Request):
            ticket.error = _denial(self.id, Reason.LOST if self._lost else Reason.GONE)
        _resolve(ticket)

    async def _feed(self, event: Event, ticket: Ticket) -> None:
        await self._take(self.record.lifecycle.decide(event), ticket)

    async def _take(self, decision: Decision, ticket: Ticket) -> None:
        """Carry out a decision and what follows from its outcome, until the state is at rest."""
        while True:
            match decision:
                case Step():
                    outcome = await self._step(decision, ticket)
                    if outcome is None:
                        return
                    decision = self.record.lifecycle.decide(outcome)
                case Satisfied(actions):
                    await self._satisfy(actions, ticket)
                    return
                case Deny(reason):
                    ticket.error = _denial(self.id, reason)
                    _resolve(ticket)
                    return
                case Ignore() | Wait():
                    _resolve(ticket)
                    return

    async def _step(self, step: Step, ticket: Ticket) -> Outcome | None:
        after = self.record.lifecycle.after(step)
        pending = [action for action in step.actions if action in FALLIBLE]
        if not pending:
            self._enter(after)
        for action in step.actions:
            try:
                outcome = await self._actions[action](ticket, step)
            except AenvError as error:
                if action not in FALLIBLE:
                    log.error("action failed", sandbox=self.id, action=action.name, error=str(error))
                elif step.otherwise is not None:
                    ticket.error = ticket.error or error
                    return step.otherwise
                else:
                    ticket.error = ticket.error or error
                    log.error("action failed, going on", sandbox=self.id, action=action.name, error=str(error))
                outcome = None
            if pending and action is pending[-1]:
                self._enter(after)
            if action in WORK:
                return outcome
        return None

    def _enter(self, lifecycle: Lifecycle) -> None:
        if lifecycle.state is not self.state:
            log.info("sandbox", sandbox=self.id, state=lifecycle.state.value, generation=lifecycle.generation)
        self.record.lifecycle = lifecycle

    async def _satisfy(self, actions: tuple[Action, ...], ticket: Ticket) -> None:
        deadline = self.record.end_at
        try:
            for action in actions:
                await self._actions[action](ticket, None)
        except AenvError as error:
            self.record.end_at = deadline
            ticket.error = error
        _resolve(ticket)

    # working: each ends in one outcome

    async def _launch(self, ticket: Ticket, _: Step | None) -> Outcome:
        if self._origin is None:
            raise AssertionError("a sandbox is launched from an origin")
        try:
            await self._start(self._origin)
        except AenvError as error:
            ticket.error = error
            return Outcome.START_FAILED
        return Outcome.STARTED

    async def _restore(self, ticket: Ticket, _: Step | None) -> Outcome:
        services = self._services
        try:
            if self.record.paused_as is None:
                raise SandboxLost(f"sandbox {self.id} has no capture to resume from")
            paused = services.snapshots.get(self.record.paused_as)
            async with services.starts.admitted():
                await self._start(origin_of(paused, services.snapshots.state(paused)))
        except AenvError as error:
            ticket.error = error
            return Outcome.RESUME_FAILED
        ticket.resumed = True
        return Outcome.RESUMED

    async def _start(self, origin: Origin) -> None:
        """Take resources, restore, tell the guest who it is. On failure everything is freed again."""
        services, record = self._services, self.record
        services.capacity.check_disk()
        services.capacity.take_memory(record.shape.memory_mib)
        self._memory_counted = True
        machine = services.warm_pool.take(record.template_id) if origin.warm else None
        try:
            if machine is None:
                machine = await services.machines.restore(
                    origin.shape,
                    origin.capture.disk_layers,
                    origin.capture.memory_layers,
                    origin.capture.state,
                    origin.capture.manifest,
                    owner=record.id,
                    policy=record.policy,
                )
            else:
                services.machines.assign(machine, record.id)
                await services.machines.set_policy(machine, record.policy)
                await machine.vm.resume()
            request = init_request(
                record, services.tokens, now=services.clock.now(), dns_servers=services.dns_servers
            )
            await machine.guest.init(request, timeout_s=services.settings.restore_timeout_s)
        except BaseException:
            if machine is not None:
                await services.machines.release(machine)
            self._give_memory()
            raise
        services.layers.hold(record.id, machine.layers)
        self._take_machine(machine)

    def _take_machine(self, machine: Machine) -> None:
        self._machine = machine
        self._watch(machine)

    def _watch(self, machine: Machine) -> None:
        vm, machine_id = machine.vm, machine.id

        async def watch() -> None:
            reason = await vm.wait()
            if self._machine is not None and self._machine.id == machine_id and self.state not in (State.KILLING, *TERMINAL):
                log.warning("VM ended", sandbox=self.id, machine=machine_id, reason=reason)
                error = SandboxLost(f"the sandbox's VM ended: {reason}")
                self.tell(Ticket(Outcome.VM_DIED, machine=machine_id, error=error))

        self._services.tasks.spawn(watch(), name=f"watch-{machine_id}")

    async def _capture_and_stay(self, ticket: Ticket, _: Step | None) -> Outcome:
        machine, services = self._running_machine(), self._services
        try:
            services.capacity.check_disk()
            self._capture = await services.capturer.capture_and_stop(
                machine, holder=self._holder, require_healthy_guest=ticket.require_healthy_guest
            )
            ticket.snapshot = self._snapshot_record(self._capture, Kind.PAUSE, None)
        except SandboxLost as error:
            ticket.error = error
            return Outcome.CAPTURE_LOST
        except AenvError as error:
            services.layers.hold(self.id, machine.layers)
            services.layers.release(self._holder)
            ticket.error = error
            return Outcome.CAPTURE_FAILED
        return Outcome.CAPTURED

    async def _capture_and_go_on(self, ticket: Ticket, _: Step | None) -> Outcome:
        machine, services = self._running_machine(), self._services
        before = machine.id

        async def persist() -> None:
            await services.database.write(replace(self.record, machine=machine.to_json()).save)

        try:
            services.capacity.check_disk()
            ticket.holder = f"{self._holder}-{id(ticket)}"
            capture = await services.capturer.capture_and_continue(machine, holder=ticket.holder, persist=persist)
        except SandboxLost as error:
            services.layers.release(ticket.holder)
            ticket.error = error
            return Outcome.CAPTURE_LOST
        except AenvError as error:
            services.layers.hold(self.id, machine.layers)
            services.layers.release(ticket.holder)
            ticket.error = error
            return Outcome.CAPTURE_FAILED
        services.layers.hold(self.id, machine.layers)
        ticket.capture = capture
        if ticket.event is Request.SNAPSHOT:
            try:
                ticket.snapshot = self._snapshot_record(capture, Kind.SNAPSHOT, ticket.snapshot_name)
            except AenvError as error:
                ticket.error = error
        if machine.id == before:
            return Outcome.CAPTURED
        self._watch(machine)
        return Outcome.SUCCEEDED

    async def _release_all(self, ticket: Ticket, _: Step | None) -> Outcome:
        if self.state is State.FAILED:
            self._lost = ticket.error or SandboxLost(f"sandbox {self.id} was lost")
        await self._release_vm(ticket, None)
        await self._drop_capture(ticket, None)
        self._services.layers.release(self.id)
        self._services.layers.release(self._holder)
        return Outcome.RELEASED

    # fallible

    async def _persist(self, ticket: Ticket, step: Step | None) -> None:
        """Write the record as of the step's end; a capture that the step keeps is committed in the same transaction."""
        services = self._services
        machine = self._machine
        lifecycle = self.record.lifecycle.after(step) if step else self.record.lifecycle
        record = replace(self.record, lifecycle=lifecycle)
        record.machine = machine.to_json() if machine and lifecycle.state is not State.PAUSED else None
        snapshot = ticket.snapshot
        if snapshot is None:
            await services.database.write(record.save)
        else:
            if snapshot.kind is Kind.PAUSE:
                record.paused_as = snapshot.id
                record.guest_unresponsive_at_pause = not snapshot.user_frozen
            try:
                await services.snapshots.commit(snapshot, also=record.save)
            except AenvError:
                ticket.snapshot = None
                services.snapshots.discard_state(snapshot.id)
                raise
            services.layers.release(self._holder)
            services.tasks.spawn(self._make_durable(snapshot), name=f"sync-{snapshot.id}")
        self.record.paused_as = record.paused_as
        self.record.guest_unresponsive_at_pause = record.guest_unresponsive_at_pause

    async def _make_durable(self, snapshot: SnapshotRecord) -> None:
        services = self._services
        layers = services.layers.paths([*snapshot.disk_layers, *snapshot.memory_layers])
        try:
            await services.machines.storage.sync_layers(layers)
        except NotFound:
            return
        await services.snapshots.mark_durable(snapshot.id)

    async def _adopt(self, ticket: Ticket, _: Step | None) -> None:
        if self._machine is None:
            raise SandboxLost(f"the VM of sandbox {self.id} is gone")

    async def _roll_back(self, ticket: Ticket, _: Step | None) -> None:
        await self._services.capturer.roll_back(self._running_machine())

    async def _thaw(self, ticket: Ticket, _: Step | None) -> None:
        await self._running_machine().guest.unfreeze()

    # never failing

    async def _publish_route(self, ticket: Ticket, _: Step | None) -> None:
        if (route := self.route) is not None:
            await self._services.front_door.publish(self.id, route)

    async def _withdraw_route(self, ticket: Ticket, _: Step | None) -> None:
        await self._services.front_door.withdraw(self.id, self.record.lifecycle.route_generation)

    async def _set_deadline(self, ticket: Ticket, _: Step | None) -> None:
        if ticket.timeout_s is not None and ticket.event is not Request.SET_TIMEOUT:
            self.record.timeout_s = ticket.timeout_s
        timeout_s = self.record.timeout_s if ticket.timeout_s is None else ticket.timeout_s
        now = self._services.clock.now()
        if self.state is State.CREATING:
            self.record.started_at = now
        self.record.end_at = now + timedelta(seconds=timeout_s)

    async def _extend_deadline(self, ticket: Ticket, _: Step | None) -> None:
        if ticket.timeout_s is not None:
            asked = self._services.clock.now() + timedelta(seconds=ticket.timeout_s)
            self.record.end_at = max(self.record.end_at, asked)

    async def _postpone_deadline(self, ticket: Ticket, _: Step | None) -> None:
        now = self._services.clock.now()
        if self.record.end_at <= now:
            self.record.end_at = now + timedelta(seconds=RETRY_INTERVAL_S)

    async def _arm_deadline(self, ticket: Ticket, _: Step | None) -> None:
        self._services.deadlines.set(self.id, self.record.end_at)

    async def _disarm_deadline(self, ticket: Ticket, _: Step | None) -> None:
        self._services.deadlines.clear(self.id)

    async def _release_vm(self, ticket: Ticket, _: Step | None) -> None:
        machine, self._machine = self._machine, None
        if machine is not None:
            await self._services.machines.release(machine)
        self._give_memory()
        if self.record.paused_as is not None:
            self._services.layers.release(self.id)

    async def _drop_capture(self, ticket: Ticket, _: Step | None) -> None:
        paused, self.record.paused_as = self.record.paused_as, None
        if paused is not None:
            try:
                await self._services.snapshots.delete(paused)
            except NotFound:
                pass

    async def _forget(self, ticket: Ticket, _: Step | None) -> None:
        await self._services.database.write(self.record.remove)

    async def _answer(self, ticket: Ticket, _: Step | None) -> None:
        _resolve(ticket)

    async def _answer_failure(self, ticket: Ticket, _: Step | None) -> None:
        if ticket.error is None:
            ticket.error = OperationFailed(f"{ticket.event.name.lower()} of sandbox {self.id} failed")
        _resolve(ticket)

    # what the above share

    @property
    def _holder(self) -> str:
        return f"capture-{self.id}"

    def _running_machine(self) -> Machine:
        if self._machine is None:
            raise SandboxLost(f"the VM of sandbox {self.id} is gone")
        return self._machine

    def _give_memory(self) -> None:
        if self._memory_counted:
            self._memory_counted = False
            self._services.capacity.give_memory(self.record.shape.memory_mib)

    def adopted(self, machine: Machine) -> None:
        """At a restart: the machine that was found running."""
        self._services.capacity.take_memory(self.record.shape.memory_mib, force=True)
        self._memory_counted = True
        self._services.layers.hold(self.id, machine.layers)
        self._take_machine(machine)

    def _snapshot_record(self, capture: Capture, kind: Kind, name: str | None) -> SnapshotRecord:
        """The record of a capture, its device state written. Raises: StorageFull."""
        snapshot_id = new_snapshot_id()
        record = self.record
        return SnapshotRecord(
            id=snapshot_id,
            kind=kind,
            created_at=self._services.clock.now(),
            manifest=capture.manifest,
            disk_layers=capture.disk_layers,
            memory_layers=capture.memory_layers,
            state_sha256=self._services.snapshots.write_state(snapshot_id, capture.state),
            vcpus=record.shape.vcpus,
            memory_mib=record.shape.memory_mib,
            disk_mib=record.shape.disk_mib,
            envd_version=record.envd_version,
            boot_id=self._services.boot_id,
            names=(name,) if name else (),
            source_sandbox=record.id,
            user_frozen=capture.user_frozen,
        )


def origin_of(snapshot: SnapshotRecord, state: bytes, *, warm: bool = False) -> Origin:
    """Where a sandbox of this snapshot starts."""
    shape = Shape(snapshot.vcpus, snapshot.memory_mib, snapshot.disk_mib)
    capture = Capture(
        disk_layers=snapshot.disk_layers,
        memory_layers=snapshot.memory_layers,
        state=state,
        manifest=snapshot.manifest,
        user_frozen=snapshot.user_frozen,
        stopped_s=0.0,
    )
    return Origin(shape, capture, warm)


def _resolve(ticket: Ticket) -> None:
    if ticket.future is not None and not ticket.future.done():
        ticket.future.set_result(ticket)


def _denial(sandbox: SandboxId, reason: Reason) -> AenvError:
    match reason:
        case Reason.GONE:
            return NotFound(f"sandbox {sandbox} not found")
        case Reason.LOST:
            return NotFound(f"sandbox {sandbox} not found: {reason}")
        case _:
            return Conflict(f"sandbox {sandbox} is {reason}")
