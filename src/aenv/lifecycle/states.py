"""The states of a sandbox, what of them is written down, and what of them is shown.

Transient states end in -ing and last while one piece of work is under way. Not all are written down: the
others are recorded as the state a restarted server would have to go back to anyway, which saves a synchronous
write on the way into every capture and resume.

* creating: durable, so that whoever finds it frees what the start had taken.
* running, pausing, snapshotting, forking: durable as running. Until a capture is committed the VM holds the
  state.
* paused, resuming: durable as paused. No user code runs before the record says running.
* killing: durable. Nothing is freed before the intention is written down.
* killed, failed: terminal. The record goes once everything is freed.
"""

from enum import StrEnum
from typing import Literal


class State(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"
    KILLED = "killed"
    FAILED = "failed"


STABLE = frozenset({State.RUNNING, State.PAUSED})
"""Nothing is under way: requests are decided here."""
TERMINAL = frozenset({State.KILLED, State.FAILED})
"""Never left. What is held is being freed, or is free."""
TRANSIENT = frozenset(State) - STABLE - TERMINAL

_PUBLIC: dict[State, Literal["running", "paused"]] = {
    State.RUNNING: "running",
    State.PAUSING: "running",
    State.SNAPSHOTTING: "running",
    State.FORKING: "running",
    State.PAUSED: "paused",
    State.RESUMING: "paused",
}

_DURABLE = {
    State.PAUSING: State.RUNNING,
    State.SNAPSHOTTING: State.RUNNING,
    State.FORKING: State.RUNNING,
    State.RESUMING: State.PAUSED,
}


def public_state(state: State) -> Literal["running", "paused"] | None:
    """What the API reports; None is "no such sandbox".

    `paused` is a promise: the sandbox can be resumed after a crash of any process. So a pausing one is still
    running (the stop is undone when the capture fails) and a resuming one still paused. During a snapshot or
    fork it stands still for milliseconds and goes on. A sandbox being created has not been given to anyone
    yet; one being killed will not come back.
    """
    return _PUBLIC.get(state)


def durable(state: State) -> State:
    """The state that `PERSIST` writes for `state`."""
    return _DURABLE.get(state, state)
