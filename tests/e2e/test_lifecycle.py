"""Pause, connect, fork, snapshot, expiry: on real VMs, through the SDK."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2b import Sandbox, SandboxException
from tests.support.node import NodeProcess

pytestmark = pytest.mark.vm

COUNTER = "i=0; while true; do i=$((i+1)); echo $i >> /tmp/counter; sleep 0.05; done"


def counter(sandbox: Sandbox) -> int:
    return int(sandbox.commands.run("tail -n 1 /tmp/counter").stdout)


def boot_id(sandbox: Sandbox) -> str:
    return sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout


def test_pause_keeps_processes_and_files(node: NodeProcess, sandbox: Sandbox) -> None:
    process = sandbox.commands.run(COUNTER, background=True, timeout=0)
    sandbox.files.write("unsynced.txt", "x" * 100_000)
    time.sleep(0.3)
    before, boot = counter(sandbox), boot_id(sandbox)
    for _ in range(3):
        sandbox.pause()
        assert sandbox.get_info().state.value == "paused"
        assert not sandbox.is_running()
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=300, **node.options)
        assert process.pid in [p.pid for p in sandbox.commands.list()]
        assert boot_id(sandbox) == boot
        assert sandbox.files.read("unsynced.txt") == "x" * 100_000
    time.sleep(0.3)
    assert counter(sandbox) > before


def test_pausing_twice_and_pausing_nobody(sandbox: Sandbox, node: NodeProcess) -> None:
    sandbox.pause()
    assert sandbox.pause() is False
    with pytest.raises(SandboxException):
        Sandbox.pause("i0000000000000000000", **node.options)


def test_forks_diverge(sandbox: Sandbox) -> None:
    sandbox.commands.run(COUNTER, background=True, timeout=0)
    sandbox.files.write("shared.txt", "before")
    children = sandbox.fork(count=4, timeout=300)
    assert all(isinstance(child, Sandbox) for child in children), children
    with ThreadPoolExecutor(4) as pool:
        entropy = list(pool.map(lambda c: c.commands.run("head -c 32 /dev/urandom | od -An -tx1").stdout, children))
        names = list(pool.map(lambda c: c.commands.run("hostname").stdout.strip(), children))
        list(pool.map(lambda c: c.files.write("shared.txt", c.sandbox_id), children))
        contents = list(pool.map(lambda c: c.files.read("shared.txt"), children))
    assert len(set(entropy)) == 4
    assert names == [child.sandbox_id for child in children]
    assert contents == [child.sandbox_id for child in children]
    assert sandbox.files.read("shared.txt") == "before"
    assert counter(sandbox) > 0
    for child in children:
        assert child.kill()


def test_ten_snapshots_are_exact_and_small(node: NodeProcess, sandbox: Sandbox) -> None:
    """Each stores about what changed since the one before, and restores exactly, whatever the source did afterwards."""
    sandbox.commands.run("mkdir data; sudo mount -t tmpfs -o size=64m tmpfs /mnt && sudo chmod 777 /mnt")

    def stored() -> int:
        return sum(path.stat().st_blocks * 512 for path in (node.home / "layers").iterdir())

    snapshots, growth = [], []
    for number in range(10):
        sandbox.commands.run(
            f"head -c 4194304 /dev/urandom > data/{number}; head -c 1048576 /dev/urandom > /mnt/{number}; sync"
        )
        digest = sandbox.commands.run("cat data/* /mnt/* | sha256sum").stdout
        before = stored()
        snapshots.append((sandbox.create_snapshot().snapshot_id, digest))
        growth.append(stored() - before)
    assert max(growth[1:]) < 128 * 1024 * 1024, growth
    assert sum(growth[5:]) < 2.5 * sum(growth[:5]), growth
    sandbox.commands.run("rm -rf data/* /mnt/*")
    for snapshot, digest in snapshots:
        copy = Sandbox.create(snapshot, timeout=300, **node.options)
        assert copy.commands.run("cat data/* /mnt/* | sha256sum").stdout == digest
        copy.kill()
        assert Sandbox.delete_snapshot(snapshot, **node.options)
        assert not Sandbox.delete_snapshot(snapshot, **node.options)


def test_snapshot_outlives_its_source(node: NodeProcess) -> None:
    source = Sandbox.create("base", timeout=300, **node.options)
    source.files.write("kept.txt", "kept")
    snapshot = source.create_snapshot().snapshot_id
    source.kill()
    copies = [Sandbox.create(snapshot, timeout=300, **node.options) for _ in range(2)]
    assert Sandbox.delete_snapshot(snapshot, **node.options)
    for copy in copies:
        assert copy.files.read("kept.txt") == "kept"
        copy.kill()


@pytest.mark.parametrize("on_timeout", ["pause", "kill"])
def test_expiry(node: NodeProcess, on_timeout: str) -> None:
    box = Sandbox.create("base", timeout=3, lifecycle={"on_timeout": on_timeout}, **node.options)
    deadline = time.monotonic() + 30
    while box.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    if on_timeout == "kill":
        with pytest.raises(SandboxException):
            box.get_info()
    else:
        while box.get_info().state.value != "paused":
            assert time.monotonic() < deadline
        box = Sandbox.connect(box.sandbox_id, timeout=60, **node.options)
        assert box.commands.run("echo back").stdout == "back\n"
        box.kill()


def test_timeouts_move(sandbox: Sandbox, node: NodeProcess) -> None:
    end = sandbox.get_info().end_at
    sandbox.set_timeout(1000)
    longer = sandbox.get_info().end_at
    assert (longer - end).total_seconds() > 600
    Sandbox.connect(sandbox.sandbox_id, timeout=10, **node.options)
    assert sandbox.get_info().end_at == longer


def test_kill_ends_a_running_command(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.commands.run, "sleep 300", timeout=0)
        time.sleep(1)
        assert sandbox.kill()
        with pytest.raises(Exception, match=r"killed|not found|end of life"):
            running.result(timeout=15)
    assert not sandbox.kill()
