"""The cache of guest assets: built once, whole or not at all, whoever dies in between."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from aenv.errors import OperationFailed
from aenv.guest.cache import content_key, ensure_directory

BUILDER = """
import asyncio, sys
from pathlib import Path
from aenv.guest.cache import ensure_directory

async def build(work):
    with Path(sys.argv[2]).open("a") as log:
        log.write("built\\n")
    (work / "file").write_text("whole")
    print("building", flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(ensure_directory(Path(sys.argv[1]), build))
"""


async def write(work: Path) -> None:
    (work / "file").write_text("whole")


def start_builder(path: Path, log: Path) -> subprocess.Popen[str]:
    """A process that builds `path`, says so in a line of its output, and is done when its input ends."""
    command = [sys.executable, "-c", BUILDER, str(path), str(log)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_builds_once(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "entry"
    results = await asyncio.gather(*(ensure_directory(path, write) for _ in range(5)))
    assert sorted(results) == [False, False, False, False, True]
    assert [entry.name for entry in path.iterdir()] == ["file"]


async def test_failure_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "entry"

    async def fail(work: Path) -> None:
        (work / "file").write_text("half")
        raise OperationFailed("no")

    with pytest.raises(OperationFailed):
        await ensure_directory(path, fail)
    assert [entry.name for entry in tmp_path.iterdir()] == [".entry.lock"]


async def test_failed_replacement_keeps_the_old(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    await ensure_directory(path, write)

    async def fail(work: Path) -> None:
        raise OperationFailed("no")

    with pytest.raises(OperationFailed):
        await ensure_directory(path, fail, replace=True)
    assert (path / "file").read_text() == "whole"


async def test_replacement(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    await ensure_directory(path, write)

    async def write_new(work: Path) -> None:
        (work / "file").write_text("new")

    with (path / "file").open() as reader:
        assert await ensure_directory(path, write_new, replace=True)
        assert reader.read() == "whole"
    assert (path / "file").read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".entry.lock", "entry"]


async def test_killed_builder(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    with start_builder(path, tmp_path / "log") as builder:
        assert builder.stdout
        builder.stdout.readline()
        builder.kill()
    assert not path.exists()
    assert (tmp_path / ".entry.part" / "file").exists()

    assert await ensure_directory(path, write)
    assert (path / "file").read_text() == "whole"
    assert not (tmp_path / ".entry.part").exists()


async def test_waits_for_another_process(tmp_path: Path) -> None:
    path, log = tmp_path / "entry", tmp_path / "log"
    with start_builder(path, log) as builder:
        assert builder.stdin
        assert builder.stdout
        builder.stdout.readline()
        waiting = asyncio.create_task(ensure_directory(path, write))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.2)
        builder.stdin.close()
        assert await waiting is False
    assert log.read_text() == "built\n"


async def test_cancelled_while_waiting(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    with start_builder(path, tmp_path / "log") as builder:
        assert builder.stdout
        builder.stdout.readline()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ensure_directory(path, write), 0.2)
        builder.kill()
    assert await ensure_directory(path, write)


def test_content_keys_differ_by_content_only() -> None:
    assert content_key(1, ("a", "b")) == content_key(1, ["a", "b"])
    assert content_key("ab") != content_key("a", "b")
