"""docs/lifecycle.md, generated: `python -m aenv.lifecycle.diagram > docs/lifecycle.md`."""

import inspect
from collections.abc import Iterator
from itertools import product

from aenv.lifecycle import states, table
from aenv.lifecycle.events import FALLIBLE, WORK, Action, Event, Outcome, Reason, Request
from aenv.lifecycle.recovery import recover
from aenv.lifecycle.states import State, durable, public_state
from aenv.lifecycle.table import BEGIN, TABLE, Decision, Deny, Satisfied, Step, Wait


def _words(member: Event | Action) -> str:
    return member.name.lower().replace("_", " ")


def _list(actions: tuple[Action, ...]) -> str:
    return ", ".join(_words(action) for action in actions) or "–"


def _body(documented: object) -> str:
    return (inspect.getdoc(documented) or "").split("\n\n", 1)[1]


def _diagram() -> Iterator[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {BEGIN.next}: create"
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, event), decision in TABLE.items():
        if isinstance(decision, Step) and decision.next is not state:
            arrows.setdefault((state, decision.next), []).append(_words(event))
    for (source, target), events in arrows.items():
        yield f"    {source} --> {target}: {', '.join(events)}"
    yield from (f"    {state} --> [*]" for state in State if state in states.TERMINAL)
    yield "```"


def _cell(decision: Decision) -> str:
    match decision:
        case Step(next=state):
            return f"→ {state}"
        case Satisfied():
            return "satisfied"
        case Wait():
            return "waits"
        case Deny(reason=reason):
            return f"denied: {reason.name.lower().replace('_', ' ')}"
        case _:
            return "ignored"


def _states() -> Iterator[str]:
    yield "| state | shown as | durable as |"
    yield "|---|---|---|"
    for state in State:
        yield f"| {state} | {public_state(state) or 'no such sandbox'} | {durable(state)} |"


def _requests() -> Iterator[str]:
    yield "| | " + " | ".join(_words(request) for request in Request) + " |"
    yield "|---" * (len(Request) + 1) + "|"
    for state in State:
        yield f"| **{state}** | " + " | ".join(_cell(TABLE[state, request]) for request in Request) + " |"


def _steps() -> Iterator[str]:
    yield "| state | event | next | actions in order | otherwise |"
    yield "|---|---|---|---|---|"
    rows: list[tuple[str, str, Decision]] = [("", "create", BEGIN)]
    rows += [(state, _words(event), decision) for (state, event), decision in TABLE.items()]
    for state, event, decision in rows:
        match decision:
            case Step(next=following, actions=actions, otherwise=otherwise, new_vm=new_vm):
                next_state = f"{following}, new generation" if new_vm else str(following)
                instead = _words(otherwise) if otherwise else "–"
                yield f"| {state} | {event} | {next_state} | {_list(actions)} | {instead} |"
            case Satisfied(actions=actions):
                yield f"| {state} | {event} | *satisfied* | {_list(actions)} | – |"


def _recovery() -> Iterator[str]:
    yield "| record says | VM alive | capture committed | next | actions in order |"
    yield "|---|---|---|---|---|"
    for state in (State.CREATING, State.RUNNING, State.PAUSED, State.KILLING, State.FAILED):
        rows = {
            facts: recover(state, vm_alive=facts[0], capture_committed=facts[1])
            for facts in product((True, False), repeat=2)
        }
        matters = (
            any(rows[True, capture] != rows[False, capture] for capture in (True, False)),
            any(rows[vm, True] != rows[vm, False] for vm in (True, False)),
        )
        told: set[tuple[str, ...]] = set()
        for facts, step in rows.items():
            cells = tuple(
                ("yes" if fact else "no") if matter else "–" for fact, matter in zip(facts, matters, strict=True)
            )
            if cells not in told:
                told.add(cells)
                yield f"| {state} | {' | '.join(cells)} | {step.next} | {_list(step.actions)} |"


def _vocabulary() -> Iterator[str]:
    for title, members in (("Requests", Request), ("Outcomes", Outcome)):
        yield f"**{title}**"
        yield ""
        yield from (f"* *{_words(member)}*: {member.value}" for member in members)
        yield ""
    kinds = {
        "Work, reporting one outcome": WORK,
        "Actions that may fail": FALLIBLE,
        "Actions that do not fail": frozenset(Action) - WORK - FALLIBLE,
    }
    for title, actions in kinds.items():
        yield f"**{title}**"
        yield ""
        yield from (f"* *{_words(action)}*: {action.value}" for action in Action if action in actions)
        yield ""
    yield "**Reasons of a denial**: " + "; ".join(f"*{reason.name.lower()}*: {reason}" for reason in Reason)


def document() -> str:
    """The whole page, in Markdown."""
    sections = [
        ["# The lifecycle of a sandbox", "", "Generated by `python -m aenv.lifecycle.diagram`; do not edit."],
        ["## States", "", *_diagram(), "", _body(public_state), "", *_states()],
        ["## What a request gets", "", *_requests()],
        ["## Steps", "", _body(table), "", *_steps()],
        ["## After a restart", "", *_recovery()],
        ["## Words", "", *_vocabulary()],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


if __name__ == "__main__":
    print(document(), end="")
