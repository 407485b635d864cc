"""One sandbox: a task and a queue. The lifecycle table decides, node/actions.py does, in the order the table gives.

Requests are read one at a time, between steps, so a sandbox never does two things at once; and whoever waits need not
hold the caller's connection: an answer that nobody takes is dropped, the work is not.
"""

import asyncio
from collections.abc import Callable

import structlog

from aenv.errors import AenvError, Conflict, NotFound, ShuttingDown
from aenv.ids import SandboxId
from aenv.lifecycle.events import FALLIBLE, WORK, Action, Event, Outcome, Reason, Request
from aenv.lifecycle.machine import Lifecycle
from aenv.lifecycle.states import TERMINAL, State, public_state
from aenv.lifecycle.table import BEGIN, Decision, Deny, Ignore, Satisfied, Step, Wait
from aenv.node.actions import Actions
from aenv.node.front_door import Route
from aenv.node.machine import Machine
from aenv.node.record import SandboxRecord
from aenv.node.services import Services
from aenv.node.ticket import Origin, Ticket
from aenv.node.views import PublicState, SandboxView

log = structlog.get_logger(__name__)


class Sandbox:
    """State after any call: what `view` says. `on_gone` is called once everything is freed, with the error that ended
    it, if any.
    """

    def __init__(
        self,
        record: SandboxRecord,
        services: Services,
        *,
        origin: Origin | None = None,
        on_gone: Callable[["Sandbox", AenvError | None], None],
    ) -> None:
        self._services = services
        self._on_gone = on_gone
        self._queue: asyncio.Queue[Ticket] = asyncio.Queue()
        self._current: Ticket | None = None
        self._rest = asyncio.Event()
        self._ended = False
        self._actions = Actions(record, services, origin, self.tell)

    # asking

    @property
    def id(self) -> SandboxId:
        return self.record.id

    @property
    def record(self) -> SandboxRecord:
        return self._actions.record

    @property
    def state(self) -> State:
        return self.record.lifecycle.state

    @property
    def route(self) -> Route | None:
        return self._actions.route

    @property
    def machine(self) -> Machine | None:
        return self._actions.machine

    def adopted(self, machine: Machine) -> None:
        """At a restart, before `run`: the machine that was found running."""
        self._actions.adopted(machine)

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
        """Queue a request and wait for its answer. Cancelling the wait does not cancel the request. Raises: the
        ticket's error.
        """
        ticket.future = asyncio.get_running_loop().create_future()
        self.tell(ticket)
        answered = await asyncio.shield(ticket.future)
        if answered.error is not None:
            raise answered.error
        return answered

    def tell(self, ticket: Ticket) -> None:
        """Queue what nobody waits for."""
        if self._ended:
            self._turn_away(ticket)
        else:
            self._rest.clear()
            self._queue.put_nowait(ticket)

    async def at_rest(self) -> None:
        """Return when nothing is under way or asked for: it runs, is paused, or is gone."""
        await self._rest.wait()

    # deciding

    async def run(self, first: Step = BEGIN, ticket: Ticket | None = None) -> None:
        """The sandbox's task: take `first`, then serve the queue until everything is freed."""
        try:
            self._current = ticket = ticket or Ticket(Request.CONNECT)
            await self._take(first, ticket)
            while self.state not in TERMINAL:
                if self._queue.empty():
                    self._rest.set()
                self._current = ticket = await self._queue.get()
                if not self._overtaken(ticket):
                    await self._feed(ticket.event, ticket)
            self._on_gone(self, self._actions.lost)
        finally:
            self._end()

    def _overtaken(self, ticket: Ticket) -> bool:
        """News of another VM than the one that serves, or an expiry after the deadline, or the clock, was moved."""
        if ticket.machine is not None:
            return self._actions.machine is None or self._actions.machine.id != ticket.machine
        expiry = ticket.event in (Request.EXPIRE_PAUSE, Request.EXPIRE_KILL) and self.state is State.RUNNING
        if expiry and self.record.end_at > self._services.clock.now():
            self._services.deadlines.set(self.id, self.record.end_at)
            return True
        return False

    def _end(self) -> None:
        """Nobody is left waiting, also when the task was cancelled or met a defect."""
        self._ended = True
        if self._current is not None:
            self._turn_away(self._current)
        while not self._queue.empty():
            self._turn_away(self._queue.get_nowait())
        self._rest.set()

    def _turn_away(self, ticket: Ticket) -> None:
        if ticket.future is None or ticket.future.done():
            return
        if self.state in TERMINAL:
            ticket.error = _denial(self.id, Reason.LOST if self._actions.lost else Reason.GONE)
        else:
            ticket.error = ShuttingDown(
                f"sandbox {self.id} is not served any more", hint="the node's next start takes it over"
            )
        ticket.resolve()

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
                    ticket.resolve()
                    return
                case Ignore() | Wait():
                    ticket.resolve()
                    return

    async def _step(self, step: Step, ticket: Ticket) -> Outcome | None:
        after = self.record.lifecycle.after(step)
        pending = [action for action in step.actions if action in FALLIBLE]
        if not pending:
            self._enter(after)
        for action in step.actions:
            try:
                outcome = await self._actions.perform(action, ticket, step)
            except AenvError as error:
                if action not in FALLIBLE:
                    log.error("action failed", sandbox=self.id, action=action.name, error=str(error))
                elif step.otherwise is not None:
                    ticket.error = ticket.error or error
                    return step.otherwise
                else:
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
                await self._actions.perform(action, ticket, None)
        except AenvError as error:
            self.record.end_at = deadline
            ticket.error = error
        ticket.resolve()


def _denial(sandbox: SandboxId, reason: Reason) -> AenvError:
    match reason:
        case Reason.GONE:
            return NotFound(f"sandbox {sandbox} not found")
        case Reason.LOST:
            return NotFound(f"sandbox {sandbox} not found: {reason}")
        case _:
            return Conflict(f"sandbox {sandbox}: {reason}")
