"""What happens to a sandbox, and what its node then has to do.

The value of each member is its meaning, in words that docs/lifecycle.md repeats; code and logs use the names.
"""

from enum import Enum, StrEnum, unique


@unique
class Request(Enum):
    """Somebody wants something: a client, or the deadline."""

    CONNECT = "be running; extend the deadline when it is already"
    RESUME = "leave paused; refused when it is running"
    PAUSE = "be captured and released"
    SNAPSHOT = "be captured and go on; the capture becomes a snapshot"
    FORK = "be captured and go on; the capture becomes the children"
    SET_TIMEOUT = "replace the deadline"
    KILL = "be gone"
    EXPIRE_PAUSE = "the deadline says pause; made only while the record's deadline has passed"
    EXPIRE_KILL = "the deadline says kill; made only while the record's deadline has passed"


@unique
class Outcome(Enum):
    """The one piece of work under way has ended, or the VM has."""

    STARTED = "a VM runs, its agent knows who it is, user processes are still frozen"
    START_FAILED = "it could not be started"
    CAPTURED = "the capture is complete; for a pause the VM stands still, else it goes on in place"
    SUCCEEDED = "the capture is complete and the sandbox goes on in a successor process"
    CAPTURE_FAILED = "no capture; the VM still holds the sandbox's state"
    CAPTURE_LOST = "no capture, and the VM no longer holds the state"
    RESUMED = "a VM is restored from the capture, its agent knows who it is, user processes are still frozen"
    RESUME_FAILED = "no VM; the capture is as it was"
    RELEASED = "everything the sandbox held is free"
    VM_DIED = "the VM of the current generation has ended by itself, or its state cannot be trusted"


Event = Request | Outcome


@unique
class Action(Enum):
    """A thing for the node to do. Work ends in one outcome, which is the next event; every other action is
    done when it returns."""

    # work: the last action of its step
    LAUNCH = "take resources, start a VM, tell its agent who it is: started, start failed"
    RESTORE = "take resources, start a VM from the capture, tell its agent who it is: resumed, resume failed"
    CAPTURE_AND_STAY = "freeze, capture, keep the VM stopped: captured, capture failed, capture lost"
    CAPTURE_AND_GO_ON = "freeze, capture, go on: captured, succeeded, capture failed, capture lost"
    RELEASE_ALL = "free everything, a pause's capture too; what resists is left to the sweep: released"

    # fallible
    PERSIST = (
        "make the record durable as of the next state: durable form, generations, deadline, layers, capture; "
        "atomic, the old record stands when it fails"
    )
    ADOPT = "take over whichever process holds the sandbox's state; end any other"
    ROLL_BACK = "the VM goes on in place and user processes thaw; idempotent"
    THAW = "user processes run"

    # infallible: errors are logged, and leftovers found by the sweep at the next start
    PUBLISH_ROUTE = "requests reach the VM, under the route generation"
    WITHDRAW_ROUTE = "no request reaches the VM; before its address can be another's"
    SET_DEADLINE = "the deadline becomes now + the time to live asked for"
    EXTEND_DEADLINE = "as set deadline, unless the deadline is later already"
    POSTPONE_DEADLINE = "a deadline that has passed moves on by a retry interval: no failing pause in a loop"
    ARM_DEADLINE = "make the expiry request at the deadline, at once if it has passed; one timer"
    DISARM_DEADLINE = "make no expiry request"
    RELEASE_VM = "free the VM and all it ran on, not the capture; idempotent"
    DROP_CAPTURE = "forget the capture of a pause; layers the VM runs on live on; idempotent"
    FORGET = "delete the record"
    ANSWER = "the request that began this is answered with success; nobody may be waiting"
    ANSWER_FAILURE = "the request that began this is answered with what went wrong; nobody may be waiting"


WORK = frozenset({Action.LAUNCH, Action.RESTORE, Action.CAPTURE_AND_STAY, Action.CAPTURE_AND_GO_ON, Action.RELEASE_ALL})
FALLIBLE = frozenset({Action.PERSIST, Action.ADOPT, Action.ROLL_BACK, Action.THAW})


class Reason(StrEnum):
    """Why a request is denied."""

    ALREADY_RUNNING = "it is already running"
    ALREADY_PAUSED = "it is already paused"
    NOT_RUNNING = "it is not running"
    GONE = "it was killed"
    LOST = "its state was lost"
