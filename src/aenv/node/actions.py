"""What the lifecycle table tells a sandbox to do, one method an action. They decide nothing; node/sandbox.py calls
them in the table's order.

Work ends in exactly one outcome. A fallible action raises AenvError with the sandbox as before; what the others raise
is to be logged, and leaves something to the sweep of the next start.
"""

import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import structlog

from aenv.errors import AenvError, NotFound, OperationFailed, SandboxLost, StorageFull
from aenv.ids import SandboxId, new_snapshot_id
from aenv.lifecycle.events import Action, Outcome, Request
from aenv.lifecycle.states import TERMINAL, State, public_state
from aenv.lifecycle.table import Step
from aenv.node import warm_pool
from aenv.node.durability import make_durable
from aenv.node.front_door import Route
from aenv.node.identity import init_request
from aenv.node.machine import Capture, Machine
from aenv.node.record import SandboxRecord
from aenv.node.services import Services
from aenv.node.ticket import Origin, Ticket, origin_of
from aenv.snapshots.records import Kind, SnapshotRecord

log = structlog.get_logger(__name__)

RETRY_INTERVAL_S = 60
"""After a pause at the deadline failed: when it is tried again."""

Method = Callable[[Ticket, Step | None], Awaitable[Outcome | None]]


class Actions:
    """The hands of one sandbox: its record, its machine while it has one, and what can be done with them.

    `tell` queues news of the VM.
    """

    def __init__(
        self, record: SandboxRecord, services: Services, origin: Origin | None, tell: Callable[[Ticket], None]
    ) -> None:
        self.record = record
        self.machine: Machine | None = None
        self.lost: AenvError | None = None
        """Why the sandbox failed, once it has."""
        self._services = services
        self._origin = origin
        self._tell = tell
        self._memory_counted = False
        self._route_held = False
        """The front door may still send requests to the machine's address."""
        self._methods: dict[Action, Method] = {
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

    @property
    def id(self) -> SandboxId:
        return self.record.id

    @property
    def state(self) -> State:
        return self.record.lifecycle.state

    async def perform(self, action: Action, ticket: Ticket, step: Step | None) -> Outcome | None:
        """Carry out one action; work returns its outcome. Raises: AenvError, but for work."""
        try:
            return await self._methods[action](ticket, step)
        except Exception as error:
            raise _known(error) from error

    @property
    def route(self) -> Route | None:
        """The route edge should hold; None while there is none to the VM."""
        if self.machine is None or public_state(self.state) is None:
            return None
        record, tokens = self.record, self._services.tokens
        return Route(
            generation=record.lifecycle.route_generation,
            address=self.machine.slot.host_address,
            access_token=tokens.envd(record.id) if record.secure else None,
            traffic_token=None if record.public_traffic else tokens.traffic(record.id),
        )

    def adopted(self, machine: Machine) -> None:
        """At a restart: the machine that was found running."""
        self._services.capacity.take_memory(self.record.shape.memory_mib, force=True)
        self._memory_counted = True
        self._services.layers.hold(self.id, machine.layers)
        self._route_held = True
        self._take_machine(machine)

    # working: each ends in one outcome

    async def _launch(self, ticket: Ticket, _: Step | None) -> Outcome:
        if self._origin is None:
            raise AssertionError("a sandbox is launched from an origin")
        try:
            await self._start(self._origin)
        except Exception as error:
            ticket.error = _known(error)
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
        except Exception as error:
            ticket.error = _known(error)
            return Outcome.RESUME_FAILED
        ticket.resumed = True
        return Outcome.RESUMED

    async def _start(self, origin: Origin) -> None:
        """Take resources, restore, tell the guest who it is. On failure everything is freed again."""
        services, record = self._services, self.record
        services.capacity.check_disk()
        services.capacity.take_memory(record.shape.memory_mib)
        self._memory_counted = True
        machine = None
        try:
            if origin.warm:
                machine = await self._warm_machine()
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
            request = init_request(record, services.tokens, now=services.clock.now(), dns_servers=services.dns_servers)
            await machine.ask(machine.guest.init(request, timeout_s=services.settings.restore_timeout_s))
        except BaseException:
            if machine is not None:
                await services.machines.release(machine)
            self._give_memory()
            raise
        services.layers.hold(record.id, machine.layers)
        self._take_machine(machine)

    async def _warm_machine(self) -> Machine | None:
        """One of the pool, going on; None when there is none that can."""
        services, record = self._services, self.record
        machine = services.warm_pool.take(record.template_id)
        if machine is None:
            return None
        try:
            services.machines.assign(machine, record.id)
            if record.policy != warm_pool.POLICY:
                await services.machines.set_policy(machine, record.policy)
            await machine.vm.resume()
        except BaseException as error:
            await services.machines.release(machine)
            if not isinstance(error, AenvError):
                raise
            log.warning("a machine of the warm pool was of no use", machine=machine.id, error=str(error))
            return None
        return machine

    def _take_machine(self, machine: Machine) -> None:
        self.machine = machine
        self._watch(machine)

    def _watch(self, machine: Machine) -> None:
        vm, machine_id = machine.vm, machine.id

        async def watch() -> None:
            reason = await vm.wait()
            if (
                self.machine is not None
                and self.machine.id == machine_id
                and self.state not in (State.KILLING, *TERMINAL)
            ):
                log.warning("VM ended", sandbox=self.id, machine=machine_id, reason=reason)
                error = SandboxLost(f"the sandbox's VM ended: {reason}")
                self._tell(Ticket(Outcome.VM_DIED, machine=machine_id, error=error))

        self._services.tasks.spawn(watch(), name=f"watch-{machine_id}")

    async def _capture_and_stay(self, ticket: Ticket, _: Step | None) -> Outcome:
        services = self._services
        try:
            services.capacity.check_disk()
            capture = await services.capturer.capture_and_stop(
                self._running_machine(), holder=self._holder, require_healthy_guest=ticket.require_healthy_guest
            )
            ticket.snapshot = self._snapshot_record(capture, Kind.PAUSE, None)
        except SandboxLost as error:
            ticket.error = error
            return Outcome.CAPTURE_LOST
        except Exception as error:
            ticket.error = _known(error)
            return Outcome.CAPTURE_FAILED
        return Outcome.CAPTURED

    async def _capture_and_go_on(self, ticket: Ticket, _: Step | None) -> Outcome:
        services = self._services
        ticket.holder = f"{self._holder}-{id(ticket)}"
        try:
            machine = self._running_machine()
            before = machine.id

            async def persist() -> None:
                await services.database.write(replace(self.record, machine=machine.to_json()).save)

            services.capacity.check_disk()
            ticket.capture = await services.capturer.capture_and_continue(
                machine, holder=ticket.holder, persist=persist
            )
        except SandboxLost as error:
            ticket.error = error
            return Outcome.CAPTURE_LOST
        except Exception as error:
            ticket.error = _known(error)
            return Outcome.CAPTURE_FAILED
        services.layers.hold(self.id, machine.layers)
        if ticket.event is Request.SNAPSHOT:
            try:
                ticket.snapshot = self._snapshot_record(ticket.capture, Kind.SNAPSHOT, ticket.snapshot_name)
            except AenvError as error:
                ticket.error = error
        if machine.id == before:
            return Outcome.CAPTURED
        self._watch(machine)
        return Outcome.SUCCEEDED

    async def _release_all(self, ticket: Ticket, _: Step | None) -> Outcome:
        if self.state is State.FAILED:
            self.lost = ticket.error or SandboxLost(f"sandbox {self.id} was lost")
        await self._release_vm(ticket, None)
        try:
            await self._drop_capture(ticket, None)
        except AenvError as error:
            log.error("capture left to the next start", sandbox=self.id, error=str(error))
        self._services.layers.release(self.id)
        self._services.layers.release(self._holder)
        return Outcome.RELEASED

    # fallible

    async def _persist(self, ticket: Ticket, step: Step | None) -> None:
        """Write the record as of the step's end; a capture that the step keeps is committed in the same transaction."""
        services = self._services
        machine = self.machine
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
            except Exception as error:
                ticket.snapshot = None
                ticket.error = _known(error)
                services.snapshots.discard_state(snapshot.id)
                raise ticket.error from error
            services.layers.release(self._holder)
            services.tasks.spawn(make_durable(services, snapshot), name=f"sync-{snapshot.id}")
        if ticket.capture is not None:
            services.capturer.keep(ticket.capture)
        self.record.paused_as = record.paused_as
        self.record.guest_unresponsive_at_pause = record.guest_unresponsive_at_pause

    async def _adopt(self, ticket: Ticket, _: Step | None) -> None:
        if self.machine is None:
            raise SandboxLost(f"the VM of sandbox {self.id} is gone")

    async def _roll_back(self, ticket: Ticket, _: Step | None) -> None:
        await self._services.capturer.roll_back(self._running_machine())

    async def _thaw(self, ticket: Ticket, _: Step | None) -> None:
        machine = self._running_machine()
        await machine.ask(machine.guest.unfreeze())

    # never failing

    async def _publish_route(self, ticket: Ticket, _: Step | None) -> None:
        if (route := self.route) is not None:
            self._route_held = True
            await self._services.front_door.publish(self.id, route)

    async def _withdraw_route(self, ticket: Ticket, _: Step | None) -> None:
        await self._services.front_door.withdraw(self.id, self.record.lifecycle.route_generation)
        self._route_held = False

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
        machine, self.machine = self.machine, None
        if machine is not None:
            await self._services.machines.release(machine, but_the_slot=self._route_held)
        self._give_memory()
        if self.record.paused_as is not None:
            self._services.layers.release(self.id)

    async def _drop_capture(self, ticket: Ticket, _: Step | None) -> None:
        """Of one that is being undone, only its layers are there yet; those the VM stands on by now stay."""
        if self.machine is not None:
            self._services.layers.hold(self.id, self.machine.layers)
        self._services.layers.release(self._holder)
        paused, self.record.paused_as = self.record.paused_as, None
        if paused is not None:
            with suppress(NotFound):
                await self._services.snapshots.delete(paused)

    async def _forget(self, ticket: Ticket, _: Step | None) -> None:
        await self._services.database.write(self.record.remove)

    async def _answer(self, ticket: Ticket, _: Step | None) -> None:
        ticket.resolve()

    async def _answer_failure(self, ticket: Ticket, _: Step | None) -> None:
        if ticket.error is None:
            ticket.error = OperationFailed(f"{ticket.event.name.lower()} of sandbox {self.id} failed")
        ticket.resolve()

    # what the above share

    @property
    def _holder(self) -> str:
        return f"capture-{self.id}"

    def _running_machine(self) -> Machine:
        if self.machine is None:
            raise SandboxLost(f"the VM of sandbox {self.id} is gone")
        return self.machine

    def _give_memory(self) -> None:
        if self._memory_counted:
            self._memory_counted = False
            self._services.capacity.give_memory(self.record.shape.memory_mib)

    def _snapshot_record(self, capture: Capture, kind: Kind, name: str | None) -> SnapshotRecord:
        """The record of a capture, its device state written. Raises: StorageFull, OperationFailed."""
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


def _known(error: Exception) -> AenvError:
    """In the terms of this program; what has none is a defect, or a host in a state nobody thought of."""
    if isinstance(error, AenvError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(f"no space left: {error}", hint="free space in AENV_HOME or AENV_RUNTIME")
    log.error("unexpected failure", exc_info=error)
    return OperationFailed(f"unexpected failure: {error!r}")
