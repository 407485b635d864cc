"""One sandbox's place in the table, as a value."""

from dataclasses import dataclass, replace

from aenv.lifecycle.events import Action, Event
from aenv.lifecycle.states import State
from aenv.lifecycle.table import TABLE, Decision, Step


class UnexpectedOutcomeError(Exception):
    """The outcome of work that this state does not do: a defect of the node, never of a caller."""


@dataclass(frozen=True)
class Lifecycle:
    """What a record holds of the lifecycle.

    `generation` counts the VMs that have served: one higher at each start, resume and succession. It names
    the VM in logs and fences the news of its death. `route_generation` is the generation whose route edge
    holds. A succession keeps address and connections, so it does not change it; were it to, edge would cut
    the client's streams at each snapshot.
    """

    state: State = State.CREATING
    generation: int = 0
    route_generation: int = 0

    def decide(self, event: Event) -> Decision:
        """What the table says; every request is decided in every state.

        Raises: UnexpectedOutcomeError.
        """
        decision = TABLE.get((self.state, event))
        if decision is None:
            raise UnexpectedOutcomeError(f"{event.name} in state {self.state}")
        return decision

    def after(self, step: Step) -> "Lifecycle":
        """The lifecycle once `step` is taken: what its PERSIST writes (`states.durable` of the state) and its
        PUBLISH_ROUTE carries."""
        generation = self.generation + step.new_vm
        published = Action.PUBLISH_ROUTE in step.actions and step.new_vm
        return replace(
            self,
            state=step.next,
            generation=generation,
            route_generation=generation if published else self.route_generation,
        )
