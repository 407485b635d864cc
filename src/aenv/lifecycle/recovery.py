"""What a restarted server does with a record, decided from what it finds."""

# ruff: noqa: N817 (a table is read across, so its words are letters)
from aenv.lifecycle.events import Action as A
from aenv.lifecycle.events import Outcome as O
from aenv.lifecycle.states import State as S
from aenv.lifecycle.states import durable
from aenv.lifecycle.table import FAIL, Step

_ADOPT = Step(
    S.RUNNING,
    (A.ADOPT, A.ROLL_BACK, A.PUBLISH_ROUTE, A.ARM_DEADLINE, A.DROP_CAPTURE),
    otherwise=O.VM_DIED,
)
_KEEP = Step(S.PAUSED, (A.WITHDRAW_ROUTE, A.RELEASE_VM))
_RELEASE = Step(S.KILLING, (A.WITHDRAW_ROUTE, A.RELEASE_ALL))
_CLEAR = Step(S.FAILED, (A.WITHDRAW_ROUTE, A.RELEASE_ALL))


def recover(state: S, *, vm_alive: bool, capture_committed: bool) -> Step:
    """The first step for a record found in `state`, taken before any other event.

    Args:
        vm_alive: a process of the ledger holds the sandbox's state: its VM, running or stopped, or a
            successor that took over.
        capture_committed: the pause capture that the record names is recorded. If it turns out damaged, the sandbox
            stays paused, and a resume says so: files can be restored.

    The cases:

    * creating: nobody was given the sandbox; it is freed, whatever there is.
    * running: the VM goes on. It may have been stopped for a capture that never was committed, or frozen
      because the server died right after writing that it runs; rolling back undoes both. Without a VM the
      state is lost.
    * paused: the capture is the sandbox. A process that is left was about to be released, or had not run user
      code yet. Without the capture the state is lost; such a process is no substitute, it may be half restored.
    * killing: go on. failed, killed: free what may be left, then forget.
    """
    match durable(state):
        case S.RUNNING if vm_alive:
            return _ADOPT
        case S.PAUSED if capture_committed:
            return _KEEP
        case S.KILLING | S.KILLED:
            return _RELEASE
        case S.FAILED:
            return _CLEAR
        case _:
            return FAIL
