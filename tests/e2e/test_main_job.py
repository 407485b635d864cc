"""What a sandbox is for: commands and files. Each holds for fresh, restored and forked sandboxes."""

import time

import pytest
from e2b import CommandExitException, FileNotFoundException, NotFoundException, Sandbox, TimeoutException

pytestmark = pytest.mark.vm


def test_commands(any_sandbox: Sandbox) -> None:
    assert any_sandbox.commands.run("echo out; echo err >&2").stdout == "out\n"
    assert any_sandbox.commands.run("echo err >&2").stderr == "err\n"
    assert any_sandbox.commands.run("whoami; pwd").stdout == "user\n/home/user\n"
    assert any_sandbox.commands.run("whoami", user="root").stdout == "root\n"
    assert any_sandbox.commands.run("sudo whoami").stdout == "root\n"
    assert any_sandbox.commands.run("echo $X", envs={"X": "y"}).stdout == "y\n"
    with pytest.raises(CommandExitException) as failed:
        any_sandbox.commands.run("exit 3")
    assert failed.value.exit_code == 3


def test_output_is_live(any_sandbox: Sandbox) -> None:
    arrivals: list[float] = []
    any_sandbox.commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.4; done", on_stdout=lambda _: arrivals.append(time.monotonic())
    )
    assert len(arrivals) == 3
    assert arrivals[-1] - arrivals[0] > 0.5


def test_a_timeout_kills_the_whole_group(any_sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        any_sandbox.commands.run("sleep 321 & sleep 321; wait", timeout=2)
    deadline = time.monotonic() + 10
    while any_sandbox.commands.run("pgrep -fc '[s]leep 321' || true").stdout.strip() != "0":
        assert time.monotonic() < deadline


def test_files(any_sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 4096
    any_sandbox.files.write("/home/user/d/e/data.bin", content)
    any_sandbox.files.write("empty.txt", "")
    assert any_sandbox.files.read("/home/user/d/e/data.bin", format="bytes") == content
    assert any_sandbox.files.read("empty.txt") == ""
    assert [entry.name for entry in any_sandbox.files.list("d/e")] == ["data.bin"]
    any_sandbox.files.rename("d/e/data.bin", "d/f/moved.bin")
    assert not any_sandbox.files.exists("d/e/data.bin")
    any_sandbox.files.remove("d")
    with pytest.raises((FileNotFoundException, NotFoundException)):
        any_sandbox.files.read("d/f/moved.bin")


def test_background_process(any_sandbox: Sandbox) -> None:
    handle = any_sandbox.commands.run("sleep 300", background=True)
    assert handle.pid in [process.pid for process in any_sandbox.commands.list()]
    assert any_sandbox.commands.kill(handle.pid)
    deadline = time.monotonic() + 10
    while handle.pid in [process.pid for process in any_sandbox.commands.list()]:
        assert time.monotonic() < deadline


def test_the_clock_is_right(any_sandbox: Sandbox) -> None:
    before = time.time()
    guest = float(any_sandbox.commands.run("date +%s.%N").stdout)
    after = time.time()
    assert before - 0.5 < guest < after + 0.5


def test_python_and_disk(any_sandbox: Sandbox) -> None:
    any_sandbox.commands.run("dd if=/dev/urandom of=/home/user/big bs=1M count=32 status=none && sync")
    digest = any_sandbox.commands.run("sha256sum /home/user/big").stdout
    any_sandbox.commands.run("echo 3 | sudo tee /proc/sys/vm/drop_caches")
    assert any_sandbox.commands.run("sha256sum /home/user/big").stdout == digest
    assert any_sandbox.commands.run("python -c 'print(sum(range(10)))'").stdout == "45\n"
