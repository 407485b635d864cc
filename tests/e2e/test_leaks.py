"""Cycles leave nothing: processes, namespaces, links, rules, mounts, descriptors, files."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2b import Sandbox
from tests.support.node import NodeProcess

from aenv.testing.leftovers import Leftovers

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(1800)]


def _files(node: NodeProcess) -> set[str]:
    """All but logs and the database, which grow by content only."""
    names = {str(p) for root in (node.home, node.runtime / "ledger", node.runtime / "vm") for p in root.rglob("*")}
    return {name for name in names if "/logs/" not in name}


def _descriptors(node: NodeProcess) -> dict[str, int]:
    pids = {"server": node.pid}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            program = Path(command.split(b"\0")[0].decode(errors="replace")).name
            if program in ("blockd", "edge") and str(node.runtime).encode() in command:
                pids[program] = int(entry.name)
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()}


def _settle(measure: Callable[[], object], expected: object) -> object:
    """Slots are destroyed in the background: give that a moment."""
    deadline = time.monotonic() + 20
    while measure() != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return measure()


def _check_no_growth(node: NodeProcess, cycle: Callable[[], None], times: int) -> None:
    for _ in range(3):
        cycle()
    time.sleep(2)
    host, files, descriptors = Leftovers.now(), _files(node), _descriptors(node)
    for _ in range(times):
        cycle()
    grown = _settle(lambda: [g for g in host.grown() if not _pooled(g)], [])
    assert grown == []
    assert len(_files(node) - files) == len(files - _files(node)), _files(node) ^ files
    now = _descriptors(node)
    assert all(now[name] <= count + 4 for name, count in descriptors.items()), (descriptors, now)


def _pooled(thing: str) -> bool:
    """Pool slots are replaced by others of the same number; their names differ."""
    return (
        thing.split(":", maxsplit=1)[0] in ("namespaces", "links", "routes", "mounts") and len(_slots()) == _POOL_SIZE
    )


_POOL_SIZE = 4


def _slots() -> list[str]:
    return [name for name in os.listdir("/sys/class/net") if name.startswith("av")]


@pytest.fixture(scope="module")
def own_node():
    process = NodeProcess(AENV_SLOT_POOL_SIZE=str(_POOL_SIZE))
    process.start()
    yield process
    process.close()


def test_fifty_creates(own_node: NodeProcess) -> None:
    def cycle() -> None:
        box = Sandbox.create("base", timeout=60, **own_node.options)
        assert box.commands.run("echo x").stdout == "x\n"
        assert box.kill()

    _check_no_growth(own_node, cycle, 50)


def test_twenty_pauses(own_node: NodeProcess) -> None:
    box = Sandbox.create("base", timeout=600, **own_node.options)

    def cycle() -> None:
        box.pause()
        assert Sandbox.connect(box.sandbox_id, timeout=600, **own_node.options).commands.run("echo x").stdout == "x\n"

    before = Leftovers.now()
    for _ in range(20):
        cycle()
    kinds = {grown.split(":")[0] for grown in before.grown()} - {
        "namespaces",
        "links",
        "routes",
        "mounts",
        "processes",
        "cgroups",
    }
    assert kinds == set()
    box.kill()
    assert _settle(lambda: list((own_node.runtime / "vm").iterdir()), []) == []
    assert [p.name for p in (own_node.home / "uppers").iterdir()] == []
    assert len(list((own_node.home / "layers").iterdir())) <= 3
