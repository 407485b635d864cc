"""Cycles leave nothing: processes, namespaces, links, rules, mounts, descriptors, files."""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from e2b import Sandbox
from tests.support.node import NodeProcess

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def own_node() -> Iterator[NodeProcess]:
    process = NodeProcess()
    process.start()
    yield process
    process.close()


def _holdings(node: NodeProcess) -> Counter[str]:
    """How much of everything the node holds: on the host by kind, on disk by directory, descriptors by process.

    Names differ from cycle to cycle (slots are replaced by others), numbers must not.
    """
    held = Counter(thing.split(":")[0] for thing in node.held())
    for root in (node.home / "layers", node.home / "uppers", node.home / "states", node.runtime):
        held[str(root.relative_to(node.directory))] = sum(1 for _ in root.rglob("*"))
    for entry in node.held():
        if found := re.match(r"process: (\d+) \S*/(blockd|edge) ", entry):
            held[f"descriptors of {found[2]}"] += len(os.listdir(f"/proc/{found[1]}/fd"))
    held["descriptors of the server"] = len(os.listdir(f"/proc/{node.pid}/fd"))
    held["nft rules"] = _rules(node)
    return held


def _rules(node: NodeProcess) -> int:
    import subprocess  # noqa: PLC0415 — this one place

    instance = (node.home / "instance-id").read_text().strip()
    listing = subprocess.run(["nft", "list", "table", "inet", f"aenv_{instance}"], capture_output=True, check=True)
    return len(listing.stdout.splitlines())


def _check_no_growth(node: NodeProcess, cycle: Callable[[], None], times: int) -> None:
    for _ in range(3):
        cycle()
    before = _settled(node)
    for _ in range(times):
        cycle()
    grown = {}
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        now = _holdings(node)
        grown = {name: (before[name], count) for name, count in now.items() if count > before[name]}
        if not grown:
            return
        time.sleep(0.5)
    pytest.fail(f"grown: {grown}")


def _settled(node: NodeProcess) -> Counter[str]:
    """Slots are made and destroyed in the background: wait until the numbers rest."""
    last = _holdings(node)
    while True:
        time.sleep(2)
        now = _holdings(node)
        if now == last:
            return now
        last = now


def test_fifty_creates(own_node: NodeProcess) -> None:
    def cycle() -> None:
        box = Sandbox.create("base", timeout=60, **own_node.options)
        assert box.commands.run("echo x").stdout == "x\n"
        assert box.kill()

    _check_no_growth(own_node, cycle, 50)


def test_twenty_pauses(own_node: NodeProcess) -> None:
    def cycle() -> None:
        box = Sandbox.create("base", timeout=600, **own_node.options)
        for _ in range(20):
            box.pause()
            box = Sandbox.connect(box.sandbox_id, timeout=600, **own_node.options)
            assert box.commands.run("echo x").stdout == "x\n"
        assert box.kill()

    before = _settled(own_node)
    cycle()
    deadline = time.monotonic() + 30
    while grown := _holdings(own_node) - before:
        assert time.monotonic() < deadline, grown
        time.sleep(0.5)


def test_captures_do_not_pile_up_files(own_node: NodeProcess) -> None:
    """The layers of a long-lived sandbox that is paused and resumed are those it stands on, and go with it."""
    box = Sandbox.create("base", timeout=600, **own_node.options)
    before = set((own_node.home / "layers").iterdir())
    for _ in range(3):
        box.pause()
        box = Sandbox.connect(box.sandbox_id, timeout=600, **own_node.options)
    grown = set((own_node.home / "layers").iterdir()) - before
    assert len(grown) == 6, "a disk and a memory layer for each pause"
    template, deadline = [own_node.home / "states" / _template(own_node)], time.monotonic() + 10
    while list((own_node.home / "states").iterdir()) != template:  # a capture is dropped after the resume is answered
        assert time.monotonic() < deadline
    box.kill()
    assert set((own_node.home / "layers").iterdir()) == before


def _template(node: NodeProcess) -> str:
    box = Sandbox.create("base", timeout=60, **node.options)
    template = box.get_info().template_id
    box.kill()
    return template
