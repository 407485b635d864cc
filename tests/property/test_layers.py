"""Layers live as long as somebody stands on them: records, sandboxes and captures in any order, crashes in between.

The model is the graph itself: what must be on disk is the union of what the living hold, nothing more or less.
"""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from aenv.ids import LayerId
from aenv.snapshots.layers import LayerStore


class Layers(RuleBasedStateMachine):
    """Holders: `record-N` are durable, `sandbox-N` are while their VM runs, `capture-N` are of work in progress."""

    sandboxes = Bundle("sandboxes")
    records = Bundle("records")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name)
        self.store = LayerStore(self.path)
        self.held: dict[str, tuple[LayerId, ...]] = {}
        self.numbers = 0

    def name(self, kind: str) -> str:
        self.numbers += 1
        return f"{kind}-{self.numbers}"

    def hold(self, holder: str, layers: tuple[LayerId, ...]) -> None:
        self.held[holder] = layers
        self.store.hold(holder, layers)

    def release(self, holder: str) -> None:
        self.held.pop(holder, None)
        self.store.release(holder)

    def make(self, *, holder: str, below: tuple[LayerId, ...]) -> tuple[LayerId, ...]:
        layers = (*below, self.store.new())
        self.hold(holder, layers)
        self.store.path(layers[-1]).touch()
        return layers

    @rule(target=records)
    def build_a_template(self) -> str:
        building, record = self.name("capture"), self.name("record")
        self.hold(record, self.make(holder=building, below=()))
        self.release(building)
        return record

    @rule(target=sandboxes, record=records)
    def start(self, record: str) -> str:
        sandbox = self.name("sandbox")
        self.hold(sandbox, self.held.get(record, ()))
        return sandbox

    @rule(target=records, sandbox=sandboxes)
    def snapshot(self, sandbox: str) -> object:
        if sandbox not in self.held:
            return multiple()
        capture, record = self.name("capture"), self.name("record")
        layers = self.make(holder=capture, below=self.held[sandbox])
        self.hold(sandbox, layers)
        self.hold(record, layers)
        self.release(capture)
        return record

    @rule(sandbox=sandboxes)
    def capture_that_fails(self, sandbox: str) -> None:
        if sandbox in self.held:
            capture = self.name("capture")
            self.make(holder=capture, below=self.held[sandbox])
            self.release(capture)

    @rule(sandbox=sandboxes)
    def capture_that_fails_once_sealed(self, sandbox: str) -> None:
        if sandbox in self.held:
            capture = self.name("capture")
            self.hold(sandbox, self.make(holder=capture, below=self.held[sandbox]))
            self.release(capture)

    @rule(target=sandboxes, sandbox=sandboxes, count=st.integers(1, 3))
    def fork(self, sandbox: str, count: int) -> object:
        if sandbox not in self.held:
            return multiple()
        capture = self.name("capture")
        layers = self.make(holder=capture, below=self.held[sandbox])
        self.hold(sandbox, layers)
        children = [self.name("sandbox") for _ in range(count)]
        for child in children:
            self.hold(child, layers)
        self.release(capture)
        return multiple(*children)

    @rule(target=records, sandbox=consumes(sandboxes))
    def pause(self, sandbox: str) -> object:
        if sandbox not in self.held:
            return multiple()
        record = self.name("record")
        self.hold(record, self.make(holder=f"capture-{sandbox}", below=self.held[sandbox]))
        self.release(f"capture-{sandbox}")
        self.release(sandbox)
        return record

    @rule(holder=consumes(sandboxes) | consumes(records))
    def delete(self, holder: str) -> None:
        self.release(holder)
        self.release(holder)

    @rule(capturing=st.booleans())
    def the_server_dies(self, capturing: bool) -> None:
        """Some files are not held any more, and some were never held by what is written down."""
        if capturing:
            self.make(holder="capture-cut-off", below=())
        self.held = {name: layers for name, layers in self.held.items() if not name.startswith("capture")}
        self.store = LayerStore(self.path)
        for name, layers in self.held.items():
            self.store.hold(name, layers)
        swept = self.store.sweep()
        assert not set(swept) & {layer for layers in self.held.values() for layer in layers}
        assert self.store.sweep() == []

    @invariant()
    def what_is_held_is_there_and_nothing_else(self) -> None:
        expected = {layer for layers in self.held.values() for layer in layers}
        assert {LayerStore.layer_of(path) for path in self.path.iterdir()} == expected

    def teardown(self) -> None:
        for holder in list(self.held):
            self.release(holder)
        assert list(self.path.iterdir()) == []
        self.directory.cleanup()


Layers.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLayers = Layers.TestCase
