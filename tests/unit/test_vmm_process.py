"""Processes that outlive us, told apart for good."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.vmm.process import Process, processes_named, spawn


@pytest.fixture
def sleeper() -> Iterator[int]:
    pid = spawn(["sleep", "1000"], {})
    yield pid
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


async def test_ends_and_tells_how(sleeper: int) -> None:
    process = Process(sleeper)
    assert process.alive
    await process.end(10)
    assert not process.alive
    assert process.outcome == "it ended with signal 9"
    await process.end(10)
    process.close()
    process.close()


async def test_the_status_of_a_child_is_known() -> None:
    process = Process(spawn(["sh", "-c", "exit 3"], {}))
    await asyncio.wait_for(process.wait(), 10)
    assert process.outcome == "it ended with status 3"
    process.close()


async def test_pid_and_start_time_name_one_process(sleeper: int) -> None:
    process = Process(sleeper)
    process.close()
    Process(sleeper, process.start_time).close()
    with pytest.raises(ProcessLookupError):
        Process(sleeper, process.start_time + 1)
    os.kill(sleeper, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, sleeper, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):  # a zombie is no process to take over
        Process(sleeper, process.start_time)
    await asyncio.to_thread(os.waitpid, sleeper, 0)
    with pytest.raises(ProcessLookupError):
        Process(sleeper)


async def test_closing_does_not_end_it(sleeper: int) -> None:
    process = Process(sleeper)
    process.close()
    process.kill()
    os.kill(sleeper, 0)
    assert Path(f"/proc/{sleeper}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_child_has_the_descriptors_it_is_given_and_no_others() -> None:
    reader, writer = os.pipe()
    other = os.open("/dev/null", os.O_RDONLY)
    try:
        pid = spawn(["sh", "-c", "ls /proc/self/fd >&7; exec sleep 1000"], {7: writer, 3: other})
        os.close(writer)
        writer = -1
        # `ls` itself has one more open, for the directory.
        assert os.read(reader, 100).split() == [b"0", b"1", b"2", b"3", b"4", b"7"]
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, pid, 0)
    finally:
        os.close(reader)
        os.close(other)
        if writer >= 0:
            os.close(writer)


async def test_descriptors_may_take_each_others_places(tmp_path: Path) -> None:
    names = [tmp_path / "a", tmp_path / "b"]
    first, second = (os.open(name, os.O_WRONLY | os.O_CREAT) for name in names)
    script = f"echo first >/proc/self/fd/{second}; echo second >/proc/self/fd/{first}"
    pid = spawn(["sh", "-c", script], {second: first, first: second})
    await asyncio.to_thread(os.waitpid, pid, 0)
    os.close(first)
    os.close(second)
    assert [name.read_text() for name in names] == ["first\n", "second\n"]


async def test_found_by_name() -> None:
    name = f"aenv-test-{os.getpid()}"
    answers, answer = os.pipe()
    questions, question = os.pipe()
    # It says when it runs: just after a spawn the kernel has no command line to show yet.
    pid = spawn(["sh", "-c", "echo; read line", "-name", f"{name}-1"], {0: questions, 1: answer})
    try:
        os.read(answers, 1)
        assert processes_named(name) == [(pid, f"{name}-1")]
        assert processes_named(f"{name}-2") == []
    finally:
        for descriptor in (question, questions, answer, answers):
            os.close(descriptor)
        await asyncio.to_thread(os.waitpid, pid, 0)
