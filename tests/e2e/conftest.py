"""Real VMs through the real SDK. One node serves most tests; those that kill or stop a node start their own."""

from collections.abc import Iterator

import pytest
from e2b import Sandbox
from tests.support.node import NodeProcess


@pytest.fixture(scope="session")
def node() -> Iterator[NodeProcess]:
    process = NodeProcess()
    process.start()
    yield process
    process.close()


@pytest.fixture
def sandbox(node: NodeProcess) -> Iterator[Sandbox]:
    """A fresh sandbox."""
    box = Sandbox.create("base", timeout=300, **node.options)
    yield box
    box.kill()


@pytest.fixture(params=["fresh", "restored", "forked"])
def any_sandbox(request: pytest.FixtureRequest, node: NodeProcess) -> Iterator[Sandbox]:
    """A sandbox that was just created, one that was paused and resumed, one that is a fork's child."""
    box = Sandbox.create("base", timeout=300, **node.options)
    others: list[Sandbox] = []
    if request.param == "restored":
        box.pause()
        box = Sandbox.connect(box.sandbox_id, timeout=300, **node.options)
    elif request.param == "forked":
        others.append(box)
        child = box.fork(count=1, timeout=300)[0]
        assert isinstance(child, Sandbox), child
        box = child
    yield box
    for each in [box, *others]:
        each.kill()
