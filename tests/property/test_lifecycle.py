"""The transition table, played by a small node against a small world in which everything may fail at any point.

`World` is the model: what really exists, whatever the server believes. `Node` reads decisions exactly as table.py
says a node must. The rules below make requests, end work in every way it can end, kill VMs, servers and hosts,
between any two actions too.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aenv.lifecycle.diagram import document
from aenv.lifecycle.events import FALLIBLE, WORK, Action, Event, Outcome, Request
from aenv.lifecycle.machine import Lifecycle, UnexpectedOutcomeError
from aenv.lifecycle.recovery import recover
from aenv.lifecycle.states import STABLE, TERMINAL, TRANSIENT, State, durable, public_state
from aenv.lifecycle.table import BEGIN, TABLE, Deny, Ignore, Satisfied, Step, Wait

WORK_OUTCOMES = {
    Action.LAUNCH: (Outcome.STARTED, Outcome.START_FAILED),
    Action.RESTORE: (Outcome.RESUMED, Outcome.RESUME_FAILED),
    Action.CAPTURE_AND_STAY: (Outcome.CAPTURED, Outcome.CAPTURE_FAILED, Outcome.CAPTURE_LOST),
    Action.CAPTURE_AND_GO_ON: (
        Outcome.CAPTURED,
        Outcome.SUCCEEDED,
        Outcome.CAPTURE_FAILED,
        Outcome.CAPTURE_LOST,
    ),
    Action.RELEASE_ALL: (Outcome.RELEASED,),
}


CLIENT_REQUESTS = [request for request in Request if not request.name.startswith("EXPIRE")]


class ServerCrash(Exception):
    pass


class ActionFailed(Exception):
    pass


@dataclass
class Vm:
    """One process, with the slot and upper it runs on."""

    number: int
    user_code: str = "frozen"
    """frozen (never ran, or stopped for a capture) or runs."""
    ran: bool = False


@dataclass
class World:
    """What exists. Every thing is counted when taken and when freed."""

    taken: Counter[str] = field(default_factory=Counter)
    freed: Counter[str] = field(default_factory=Counter)
    vm: Vm | None = None
    capture: bool = False
    record: Lifecycle | None = None
    route: tuple[int, int] | None = None
    """(route generation, VM number) that edge holds."""
    published: dict[int, int] = field(default_factory=dict)
    """Route generation → VM it was first published for, successors counting as the same."""
    numbers: "count[int]" = field(default_factory=count)

    def start_vm(self) -> None:
        assert self.vm is None, "two VMs of one sandbox"
        self.vm = Vm(next(self.numbers))
        self.taken[f"vm {self.vm.number}"] += 1

    def end_vm(self) -> None:
        if self.vm is not None:
            self.freed[f"vm {self.vm.number}"] += 1
            self.vm = None

    def set_capture(self) -> None:
        assert not self.capture
        self.capture = True
        self.taken["capture"] += 1

    def drop_capture(self) -> None:
        if self.capture:
            self.freed["capture"] += 1
            self.capture = False


@dataclass
class Node:
    """A server process, reading decisions as the table's documentation says."""

    world: World
    lifecycle: Lifecycle
    answers: Counter[int]
    inbox: deque[tuple[int | None, Event]] = field(default_factory=deque)
    began: int | None = None
    work: Action | None = None
    armed: bool = False
    deadline_passed: bool = False
    stale: bool = False
    """The record could not be written although the step was taken."""
    countdown: int | None = None
    """Fallible actions, or actions before a crash, that still go well."""
    crash: bool = False
    expiry: Request = Request.EXPIRE_PAUSE

    def take(self, step: Step) -> None:
        after = self.lifecycle.after(step)
        assert after.generation >= self.lifecycle.generation
        assert self.lifecycle.state not in TERMINAL or after.state is self.lifecycle.state
        fallible = [index for index, action in enumerate(step.actions) if action in FALLIBLE]
        last = max(fallible, default=-1)
        if last < 0:
            self.lifecycle = after
        for index, action in enumerate(step.actions):
            try:
                self.sabotage(action)
                self.carry_out(action, after)
            except ActionFailed:
                if step.otherwise is not None:
                    self.feed(step.otherwise)
                    return
                self.stale = self.stale or action is Action.PERSIST
            if index == last:
                self.lifecycle = after

    def feed(self, event: Event) -> None:
        decision = self.lifecycle.decide(event)
        assert isinstance(decision, Step), f"{event} in {self.lifecycle.state} leads nowhere"
        self.take(decision)

    def read_inbox(self) -> None:
        while self.inbox:
            number, event = self.inbox[0]
            decision = self.lifecycle.decide(event)
            if isinstance(decision, Wait):
                assert self.work is not None, "waiting for nothing"
                return
            self.inbox.popleft()
            if event in (Request.EXPIRE_PAUSE, Request.EXPIRE_KILL) and not self.deadline_passed:
                continue
            match decision:
                case Step():
                    if isinstance(event, Request):
                        assert self.began is None, "a request is overtaken"
                        self.began = number
                    self.take(decision)
                case Satisfied(actions=actions):
                    try:
                        for action in actions:
                            self.sabotage(action)
                            self.carry_out(action, self.lifecycle)
                    except ActionFailed:
                        pass
                    self.answer(number)
                case Deny():
                    self.answer(number)
                case Ignore():
                    assert number is None

    def answer(self, number: int | None) -> None:
        if number is not None:
            self.answers[number] += 1

    def sabotage(self, action: Action) -> None:
        if self.countdown is None or (not self.crash and action not in FALLIBLE):
            return
        if self.countdown > 0:
            self.countdown -= 1
            return
        self.countdown = None
        raise ServerCrash if self.crash else ActionFailed

    def carry_out(self, action: Action, after: Lifecycle) -> None:  # noqa: PLR0912 (one case an action)
        world = self.world
        if action in WORK:
            assert self.work is None, "two things at once"
            self.work = action
        match action:
            case Action.PERSIST:
                world.record = Lifecycle(durable(after.state), after.generation, after.route_generation)
                self.stale = False
            case Action.ADOPT:
                if world.vm is None:
                    raise ActionFailed
            case Action.ROLL_BACK | Action.THAW:
                if world.vm is None:
                    raise ActionFailed
                assert world.record is not None
                assert world.record.state is State.RUNNING, "user code runs before the record says so"
                world.vm.user_code, world.vm.ran = "runs", True
            case Action.PUBLISH_ROUTE:
                if world.vm is not None:
                    first = world.published.setdefault(after.route_generation, world.vm.number)
                    assert first == world.vm.number, "another VM under an old route generation"
                    assert after.route_generation == max(world.published)
                    world.route = (after.route_generation, world.vm.number)
            case Action.WITHDRAW_ROUTE:
                world.route = None
            case Action.SET_DEADLINE | Action.EXTEND_DEADLINE | Action.POSTPONE_DEADLINE:
                self.deadline_passed = False
            case Action.ARM_DEADLINE:
                self.armed = not self.deadline_passed
                if self.deadline_passed:
                    self.inbox.append((None, self.expiry))
            case Action.DISARM_DEADLINE:
                self.armed = False
            case Action.RELEASE_VM:
                assert world.route is None
                if world.vm is not None and world.vm.ran:
                    assert world.capture, "the VM that holds the state is freed without a capture"
                    assert world.record is not None
                    assert world.record.state is State.PAUSED, "freed before the record says it is not needed"
                world.end_vm()
            case Action.DROP_CAPTURE:
                if self.lifecycle.state is State.RUNNING or after.state is State.RUNNING:
                    world.drop_capture()
            case Action.FORGET:
                world.record = None
            case Action.ANSWER | Action.ANSWER_FAILURE:
                self.answer(self.began)
                self.began = None

    def end_work(self, outcome: Outcome) -> None:
        """What the world is like after the work, then the outcome."""
        world, self.work = self.world, None
        match outcome:
            case Outcome.STARTED | Outcome.RESUMED:
                world.start_vm()
            case Outcome.CAPTURED if self.lifecycle.state is State.PAUSING:
                assert world.vm is not None
                world.vm.user_code = "frozen"
                world.set_capture()
            case Outcome.SUCCEEDED:
                self.succeed()
            case Outcome.CAPTURE_LOST:
                world.end_vm()
            case Outcome.RELEASED:
                assert world.route is None, "freed under a published route"
                world.end_vm()
                world.drop_capture()
        self.feed(outcome)
        self.read_inbox()

    def succeed(self) -> None:
        world = self.world
        assert world.vm is not None
        old = world.vm.number
        world.end_vm()
        world.start_vm()
        assert world.vm is not None
        world.vm.user_code, world.vm.ran = "runs", True
        for generation, number in world.published.items():
            if number == old:
                world.published[generation] = world.vm.number
        if world.route is not None:
            world.route = (world.route[0], world.vm.number)


class Lifecycles(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.answers: Counter[int] = Counter()
        self.lost: set[int] = set()
        """Requests whose connection broke with the server."""
        self.numbers = count()
        self.asked: list[int] = []
        self.node: Node | None = None
        self.ended = False

    @initialize(kill=st.booleans())
    def create(self, kill: bool) -> None:
        number = self.ask()
        self.node = Node(self.world, Lifecycle(), self.answers, began=number)
        self.node.expiry = Request.EXPIRE_KILL if kill else Request.EXPIRE_PAUSE
        self.guarded(lambda node: node.take(BEGIN))

    def ask(self) -> int:
        self.asked.append(number := next(self.numbers))
        return number

    def guarded(self, act) -> None:  # type: ignore[no-untyped-def]
        assert self.node is not None
        try:
            act(self.node)
        except ServerCrash:
            self.server_dies()

    def up(self) -> bool:
        return self.node is not None

    def working(self) -> bool:
        return self.node is not None and self.node.work is not None

    @precondition(up)
    @rule(request=st.sampled_from(CLIENT_REQUESTS))
    def one_asks(self, request: Request) -> None:
        self.request(request)

    @precondition(up)
    @rule(requests=st.lists(st.sampled_from(CLIENT_REQUESTS), min_size=2, max_size=4))
    def some_ask(self, requests: list[Request]) -> None:
        for request in requests:
            if self.node is not None:
                self.request(request)

    def request(self, request: Request) -> None:
        assert self.node is not None
        self.node.inbox.append((self.ask(), request))
        self.guarded(Node.read_inbox)

    @precondition(up)
    @rule()
    def the_deadline_passes(self) -> None:
        assert self.node is not None
        self.node.deadline_passed = True
        if self.node.armed:
            self.node.armed = False
            self.node.inbox.append((None, self.node.expiry))
        self.guarded(Node.read_inbox)

    @precondition(working)
    @rule(choices=st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3]), min_size=1, max_size=5))
    def some_work_ends(self, choices: list[int]) -> None:
        for choice in choices:
            if self.working():
                self.work_ends(choice)

    def work_ends(self, choice: int) -> None:
        assert self.node is not None
        assert self.node.work is not None
        outcomes = WORK_OUTCOMES[self.node.work]
        outcome = outcomes[min(choice, len(outcomes) - 1)]
        if self.world.vm is None and outcome in (Outcome.CAPTURED, Outcome.SUCCEEDED, Outcome.CAPTURE_FAILED):
            outcome = Outcome.CAPTURE_LOST  # the VM died under the work
        self.guarded(lambda node: node.end_work(outcome))

    @precondition(lambda self: self.up() and self.world.vm is not None and self.world.vm.ran)
    @rule()
    def the_vm_dies(self) -> None:
        assert self.node is not None
        self.world.end_vm()
        self.node.inbox.append((None, Outcome.VM_DIED))
        self.guarded(Node.read_inbox)

    @precondition(up)
    @rule(disturbance=st.sampled_from(["fail", "crash later", "crash", "crash half-done"]), after=st.integers(0, 6))
    def something_goes_wrong(self, disturbance: str, after: int) -> None:
        assert self.node is not None
        match disturbance:
            case "fail" | "crash later":
                self.node.countdown, self.node.crash = after, disturbance == "crash later"
            case "crash half-done":
                self.leave_half_done(self.node)
                self.server_dies()
            case _:
                self.server_dies()

    def leave_half_done(self, node: Node) -> None:
        match node.work:
            case Action.LAUNCH | Action.RESTORE:
                self.world.start_vm()
            case Action.CAPTURE_AND_STAY if self.world.vm is not None:
                self.world.vm.user_code = "frozen"
                self.world.set_capture()
            case Action.CAPTURE_AND_GO_ON if self.world.vm is not None:
                node.succeed()
            case Action.RELEASE_ALL:
                self.world.end_vm()

    def server_dies(self) -> None:
        assert self.node is not None
        node, self.node = self.node, None
        self.lost |= {number for number in self.asked if not self.answers[number]}
        before = node.lifecycle.state
        if self.world.record is None:
            self.ended = True
        self.before = (before, node.stale, node.deadline_passed, node.expiry)

    @precondition(lambda self: not self.up() and not self.ended)
    @rule()
    def the_host_reboots(self) -> None:
        self.world.end_vm()
        self.world.route = None

    @precondition(lambda self: not self.up() and not self.ended)
    @rule(power_loss=st.booleans())
    def the_server_starts(self, power_loss: bool) -> None:
        record = self.world.record
        assert record is not None
        if power_loss and self.world.vm is None:
            self.world.drop_capture()
        alive = self.world.vm is not None
        step = recover(record.state, vm_alive=alive, capture_committed=self.world.capture)
        before, stale, deadline_passed, expiry = self.before
        if before in TERMINAL | {State.KILLING} and not stale:
            assert public_state(step.next) is None, "what was gone is back"
        if alive and public_state(before) == "running" and not stale:
            assert step.next in (State.RUNNING, State.PAUSED), "a living sandbox is lost"
        self.node = Node(self.world, record, self.answers, deadline_passed=deadline_passed, expiry=expiry)
        self.guarded(lambda node: (node.take(step), node.read_inbox()))

    @precondition(lambda self: self.ended)
    @rule()
    def nothing_is_left_to_do(self) -> None:
        """The server died without a record of the sandbox."""

    @invariant()
    def what_is_reported_is_true(self) -> None:
        if self.node is None:
            return
        world, state = self.world, self.node.lifecycle.state
        if public_state(state) == "paused":
            assert world.capture
            assert world.record is not None
            assert world.record.state is State.PAUSED or self.node.stale
            assert world.route is None
        if state is State.RUNNING:
            assert world.vm is not None
            assert world.vm.user_code == "runs"
            assert world.route == (self.node.lifecycle.route_generation, world.vm.number)
            assert not world.capture
        if public_state(state) is None:
            assert world.route is None

    @invariant()
    def the_deadline_is_armed_in_running_only(self) -> None:
        if self.node is not None:
            running = self.node.lifecycle.state is State.RUNNING
            made = any(event is self.node.expiry for _, event in self.node.inbox)
            assert running or not self.node.armed
            assert self.node.armed or made or not running

    @invariant()
    def somebody_is_working_or_nothing_is_to_do(self) -> None:
        if self.node is not None and not self.node.work:
            assert self.node.lifecycle.state in STABLE | TERMINAL
            assert not self.node.inbox
            assert self.node.began is None

    @invariant()
    def nothing_is_freed_twice(self) -> None:
        assert all(number <= self.world.taken[name] for name, number in self.world.freed.items())

    def teardown(self) -> None:
        """From wherever it got to, the sandbox can be ended, and leaves nothing."""
        for _ in range(20 + 3 * len(self.asked)):
            if self.node is None and self.ended:
                break
            if self.node is None:
                self.the_server_starts(power_loss=False)
                continue
            self.node.countdown = None
            if self.node.lifecycle.state in TERMINAL and not self.node.work:
                break
            if self.node.work:
                self.work_ends(0)
            else:
                self.request(Request.KILL)
        else:
            pytest.fail("no way out")
        if self.node is not None:
            assert not self.node.armed
        assert self.world.record is None
        assert self.world.taken == self.world.freed
        assert self.world.route is None
        assert {number for number in self.asked if self.answers[number] != 1} <= self.lost
        assert all(self.answers[number] <= 1 for number in self.asked)


Lifecycles.TestCase.settings = settings(max_examples=1000, stateful_step_count=40, deadline=None)
TestLifecycles = Lifecycles.TestCase


def test_a_pause_that_cannot_be_written_down_is_undone() -> None:
    world, answers = World(), Counter[int]()
    node = Node(world, Lifecycle(), answers)
    node.take(BEGIN)
    node.end_work(Outcome.STARTED)
    node.inbox.append((1, Request.PAUSE))
    node.read_inbox()
    node.countdown = 0  # the next write fails
    node.end_work(Outcome.CAPTURED)
    assert (node.lifecycle.state, node.armed, answers[1]) == (State.RUNNING, True, 1)
    assert (world.capture, world.vm is not None and world.vm.user_code) == (False, "runs")


def test_every_request_is_decided_in_every_state() -> None:
    assert {(state, request) for state in State for request in Request} <= TABLE.keys()
    assert {(state, Outcome.VM_DIED) for state in State} <= TABLE.keys()


def test_every_outcome_of_work_is_decided_where_the_work_is_done() -> None:
    for step in [BEGIN, *(row for row in TABLE.values() if isinstance(row, Step))]:
        *others, last = step.actions
        assert not WORK & set(others), "work is the last action"
        if last in WORK:
            assert all((step.next, outcome) in TABLE for outcome in WORK_OUTCOMES[last])
        else:
            assert step.next in STABLE | TERMINAL


def test_a_failed_action_leads_somewhere() -> None:
    for (state, _), row in TABLE.items():
        if isinstance(row, Step) and row.otherwise:
            assert isinstance(TABLE[state, row.otherwise], Step)


def test_only_work_waits() -> None:
    waiting = {state for (state, _), row in TABLE.items() if isinstance(row, Wait)}
    assert waiting == TRANSIENT - {State.KILLING}


def test_terminal_states_are_never_left() -> None:
    for (state, event), row in TABLE.items():
        if state in TERMINAL and isinstance(row, Step):
            assert (event, row.next) in {(Outcome.RELEASED, State.FAILED)}


def test_a_succession_keeps_the_route_and_a_resume_does_not() -> None:
    served = Lifecycle().after(TABLE[State.CREATING, Outcome.STARTED])  # type: ignore[arg-type]
    assert (served.generation, served.route_generation) == (1, 1)
    succeeded = Lifecycle(State.FORKING, 1, 1).after(TABLE[State.FORKING, Outcome.SUCCEEDED])  # type: ignore[arg-type]
    assert (succeeded.generation, succeeded.route_generation) == (2, 1)
    resumed = Lifecycle(State.RESUMING, 2, 1).after(TABLE[State.RESUMING, Outcome.RESUMED])  # type: ignore[arg-type]
    assert (resumed.generation, resumed.route_generation) == (3, 3)


def test_a_defect_of_the_node_is_told_apart() -> None:
    with pytest.raises(UnexpectedOutcomeError, match="RESUMED in state running"):
        Lifecycle(State.RUNNING).decide(Outcome.RESUMED)


def test_the_page_is_current(pytestconfig: pytest.Config) -> None:
    page = pytestconfig.rootpath / "docs" / "lifecycle.md"
    assert page.read_text() == document(), "run: python -m aenv.lifecycle.diagram > docs/lifecycle.md"
