"""The server is killed; nothing its users have is."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from e2b import Sandbox
from tests.e2e.test_lifecycle import COUNTER, counter
from tests.support.node import NodeProcess

pytestmark = pytest.mark.vm


@pytest.fixture
def own_node() -> Iterator[NodeProcess]:
    process = NodeProcess()
    process.start()
    yield process
    process.close()


def test_server_killed_beside_another_node(own_node: NodeProcess, node: NodeProcess) -> None:
    """3 running, 2 paused and a stream survive `kill -9` of their server; another node's sandboxes do not notice."""
    neighbour = Sandbox.create("base", timeout=600, **node.options)
    running = [Sandbox.create("base", timeout=600, **own_node.options) for _ in range(3)]
    paused = [Sandbox.create("base", timeout=600, **own_node.options) for _ in range(2)]
    for box in running:
        box.commands.run(COUNTER, background=True, timeout=0)
    for box in paused:
        box.files.write("mark.txt", box.sandbox_id)
        box.pause()

    ticks: list[float] = []
    script = "for i in $(seq 1 100); do echo $i; sleep 0.1; done"

    def stream() -> None:
        running[0].commands.run(script, timeout=0, on_stdout=lambda _: ticks.append(time.monotonic()))

    streaming = threading.Thread(target=stream)
    streaming.start()
    while len(ticks) < 10:
        time.sleep(0.05)
    before = [counter(box) for box in running]
    own_node.kill()
    killed_at = time.monotonic()
    time.sleep(1)
    own_node.start()
    streaming.join(200)
    assert len(ticks) == 100
    assert max(b - a for a, b in pairwise(ticks)) < 5.0, "the stream stalled"
    assert ticks[-1] > killed_at

    states = {info.sandbox_id: info.state.value for info in Sandbox.list(**own_node.options).next_items()}
    assert states == {box.sandbox_id: "running" for box in running} | {box.sandbox_id: "paused" for box in paused}
    assert all(counter(box) > was for box, was in zip(running, before, strict=True))
    for box in paused:
        again = Sandbox.connect(box.sandbox_id, timeout=60, **own_node.options)
        assert again.files.read("mark.txt") == box.sandbox_id
    running[0].pause()
    again = Sandbox.connect(running[0].sandbox_id, timeout=60, **own_node.options)
    assert counter(again) > before[0]
    assert neighbour.commands.run("echo fine").stdout == "fine\n"
    neighbour.kill()


def test_a_killed_vm_is_reported_gone(node: NodeProcess) -> None:
    others = node.machine_pids()
    sandbox = Sandbox.create("base", timeout=60, **node.options)
    (pid,) = node.machine_pids() - others
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while sandbox.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert sandbox.sandbox_id not in [info.sandbox_id for info in Sandbox.list(**node.options).next_items()]
    assert not sandbox.kill()


def test_blockd_killed(own_node: NodeProcess) -> None:
    """What ran is lost, and said to be; what is paused is not; creates work again at once."""
    paused = Sandbox.create("base", timeout=600, **own_node.options)
    paused.files.write("kept.txt", "kept")
    paused.pause()
    running = Sandbox.create("base", timeout=600, **own_node.options)
    os.kill(own_node.blockd_pid(), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while running.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    fresh = Sandbox.create("base", timeout=600, **own_node.options)
    assert fresh.commands.run("echo fine").stdout == "fine\n"
    assert Sandbox.connect(paused.sandbox_id, timeout=600, **own_node.options).files.read("kept.txt") == "kept"
    states = {info.sandbox_id: info.state.value for info in Sandbox.list(**own_node.options).next_items()}
    assert states == {fresh.sandbox_id: "running", paused.sandbox_id: "running"}
    assert len(own_node.machine_pids()) == len(list((own_node.home / "uppers").iterdir())) == 2
    assert own_node.stop() == 0
    assert own_node.held() == []


def test_stop_pauses_and_leaves_nothing() -> None:
    node = NodeProcess().start()
    box = Sandbox.create("base", timeout=600, **node.options)
    box.files.write("kept.txt", "kept")
    assert node.stop() == 0
    assert node.held() == []
    node.start()
    assert Sandbox.connect(box.sandbox_id, timeout=60, **node.options).files.read("kept.txt") == "kept"
    assert node.stop() == 0
    assert node.held() == []
    node.close()


@pytest.mark.parametrize("step", ["importing", "booting", "settling"])
def test_a_start_that_is_given_up_leaves_nothing(step: str) -> None:
    node = NodeProcess()
    node.spawn()
    deadline = time.monotonic() + 120
    while f"template base: {step}" not in node.log:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert node.stop() == 0
    assert "stopped before it was ready" in node.log
    assert node.held() == []
    node.start().close()


def test_keep_running() -> None:
    node = NodeProcess().start()
    box = Sandbox.create("base", timeout=600, **node.options)
    box.commands.run(COUNTER, background=True, timeout=0)
    before = counter(box)
    node.stop()
    node.start("--keep-running")
    box = Sandbox.connect(box.sandbox_id, timeout=600, **node.options)
    node.stop()
    assert counter(box) > before, "it answers while no server runs"
    node.start()
    assert box.get_info().state.value == "running"
    node.close()
