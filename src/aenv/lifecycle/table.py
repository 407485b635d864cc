"""The transition table: (state, event) → decision. Data and nothing else.

How a node reads a decision:

* `Step`: carry out the actions in order; the sandbox is in `next` once the last fallible one is done. When a
  fallible action fails the step is not taken: the rest is dropped and `otherwise` is the next event, in the
  state the sandbox is still in. A step without an `otherwise` is taken all the same: the failure is logged,
  the list goes on, and the next PERSIST (or a restart) catches up.
* `Satisfied`: carry out the actions and answer with success. When PERSIST fails the deadline is as it was and
  the failure is the answer.
* `Wait`: decide again after the next step. One queue per sandbox, read only in between, does just that.
* `Deny`: answer with the reason.
* `Ignore`: overtaken by something else; nobody waits for an answer.

The order of a list is the write-ahead order: nothing is freed before PERSIST has written that it is not
needed, no user code runs before PERSIST has written that it does, and no address is freed before its route is
withdrawn. So a crash between any two actions leaves what `recovery.recover` brings to the same end.
"""

# ruff: noqa: N817 (a table is read across, so its words are letters)

from dataclasses import dataclass

from aenv.lifecycle.events import Action as A
from aenv.lifecycle.events import Event, Reason
from aenv.lifecycle.events import Outcome as O
from aenv.lifecycle.events import Request as R
from aenv.lifecycle.states import TRANSIENT
from aenv.lifecycle.states import State as S


@dataclass(frozen=True)
class Step:
    next: S
    actions: tuple[A, ...] = ()
    otherwise: O | None = None
    """The next event when a fallible action fails."""
    new_vm: bool = False
    """Another VM serves from here on: the generation is one higher."""


@dataclass(frozen=True)
class Satisfied:
    actions: tuple[A, ...] = ()


@dataclass(frozen=True)
class Wait:
    pass


@dataclass(frozen=True)
class Deny:
    reason: Reason


@dataclass(frozen=True)
class Ignore:
    pass


Decision = Step | Satisfied | Wait | Deny | Ignore

BEGIN = Step(S.CREATING, (A.PERSIST, A.LAUNCH), otherwise=O.START_FAILED)
"""How every sandbox, a forked one too, comes into being."""
FAIL = Step(S.FAILED, (A.DISARM_DEADLINE, A.PERSIST, A.WITHDRAW_ROUTE, A.RELEASE_ALL))
"""The end of a sandbox whose state is lost."""

_SERVE = (A.SET_DEADLINE, A.PERSIST, A.THAW, A.PUBLISH_ROUTE, A.ARM_DEADLINE, A.ANSWER)
_PAUSE = Step(S.PAUSING, (A.DISARM_DEADLINE, A.CAPTURE_AND_STAY))
_RESUME = Step(S.RESUMING, (A.RESTORE,))
_KILL = Step(S.KILLING, (A.DISARM_DEADLINE, A.PERSIST, A.WITHDRAW_ROUTE, A.RELEASE_ALL))
_GO_ON = (A.PERSIST, A.ARM_DEADLINE, A.ANSWER)
_UNDO = Step(
    S.RUNNING,
    (A.ROLL_BACK, A.DROP_CAPTURE, A.POSTPONE_DEADLINE, A.ARM_DEADLINE, A.ANSWER_FAILURE),
    otherwise=O.CAPTURE_LOST,
)

TABLE: dict[tuple[S, Event], Decision] = {
    (S.CREATING, O.STARTED): Step(S.RUNNING, _SERVE, otherwise=O.START_FAILED, new_vm=True),
    (S.CREATING, O.START_FAILED): FAIL,
    (S.RUNNING, R.CONNECT): Satisfied((A.EXTEND_DEADLINE, A.PERSIST, A.ARM_DEADLINE)),
    (S.RUNNING, R.SET_TIMEOUT): Satisfied((A.SET_DEADLINE, A.PERSIST, A.ARM_DEADLINE)),
    (S.RUNNING, R.RESUME): Deny(Reason.ALREADY_RUNNING),
    (S.RUNNING, R.PAUSE): _PAUSE,
    (S.RUNNING, R.EXPIRE_PAUSE): _PAUSE,
    (S.RUNNING, R.SNAPSHOT): Step(S.SNAPSHOTTING, (A.DISARM_DEADLINE, A.CAPTURE_AND_GO_ON)),
    (S.RUNNING, R.FORK): Step(S.FORKING, (A.DISARM_DEADLINE, A.CAPTURE_AND_GO_ON)),
    (S.RUNNING, R.KILL): _KILL,
    (S.RUNNING, R.EXPIRE_KILL): _KILL,
    (S.RUNNING, O.VM_DIED): FAIL,
    (S.PAUSING, O.CAPTURED): Step(
        S.PAUSED, (A.PERSIST, A.WITHDRAW_ROUTE, A.ANSWER, A.RELEASE_VM), otherwise=O.CAPTURE_FAILED
    ),
    (S.PAUSING, O.CAPTURE_FAILED): _UNDO,
    (S.PAUSING, O.CAPTURE_LOST): FAIL,
    (S.PAUSED, R.CONNECT): _RESUME,
    (S.PAUSED, R.RESUME): _RESUME,
    (S.PAUSED, R.PAUSE): Deny(Reason.ALREADY_PAUSED),
    (S.PAUSED, R.SNAPSHOT): Deny(Reason.NOT_RUNNING),
    (S.PAUSED, R.FORK): Deny(Reason.NOT_RUNNING),
    (S.PAUSED, R.SET_TIMEOUT): Deny(Reason.NOT_RUNNING),
    (S.PAUSED, R.KILL): _KILL,
    (S.PAUSED, O.VM_DIED): Ignore(),
    (S.RESUMING, O.RESUMED): Step(S.RUNNING, (*_SERVE, A.DROP_CAPTURE), otherwise=O.RESUME_FAILED, new_vm=True),
    (S.RESUMING, O.RESUME_FAILED): Step(S.PAUSED, (A.PERSIST, A.RELEASE_VM, A.ANSWER_FAILURE)),
    (S.KILLING, O.RELEASED): Step(S.KILLED, (A.FORGET, A.ANSWER)),
    (S.FAILED, O.RELEASED): Step(S.FAILED, (A.FORGET, A.ANSWER_FAILURE)),
}

for _state in (S.SNAPSHOTTING, S.FORKING):
    TABLE[_state, O.CAPTURED] = Step(S.RUNNING, _GO_ON)
    TABLE[_state, O.SUCCEEDED] = Step(S.RUNNING, _GO_ON, new_vm=True)
    TABLE[_state, O.CAPTURE_FAILED] = _UNDO
    TABLE[_state, O.CAPTURE_LOST] = FAIL

for _state in TRANSIENT - {S.KILLING}:
    TABLE |= {(_state, event): Wait() for event in (*R, O.VM_DIED)}
for _state, _reason in ((S.KILLING, Reason.GONE), (S.KILLED, Reason.GONE), (S.FAILED, Reason.LOST)):
    TABLE |= {(_state, request): Deny(_reason) for request in R}
    TABLE[_state, O.VM_DIED] = Ignore()
for _state in S:
    if _state is not S.RUNNING:
        TABLE |= {(_state, expiry): Ignore() for expiry in (R.EXPIRE_PAUSE, R.EXPIRE_KILL)}
