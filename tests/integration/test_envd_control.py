"""The node's client against a real agent: control calls, and what a freeze does to processes."""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.envd import free_port, running_envd

from aenv.errors import GuestUnresponsive, OperationFailed
from aenv.guest.client import EnvdClient, InitRequest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="envd starts programs as other users")
HIERARCHIES = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


@pytest.fixture
def cgroup():
    """A cgroup v2 directory of its own; skips where the machine has none that can freeze."""
    hierarchy = next((path for path in HIERARCHIES if (path / "cgroup.controllers").exists()), None)
    if hierarchy is None:
        pytest.skip("no cgroup v2 hierarchy")
    group = hierarchy / f"envd-test-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "cgroup.kill").write_text("1")
    for path in [*group.iterdir(), group]:
        if path.is_dir():
            for _ in range(200):
                with suppress(OSError):
                    path.rmdir()
                    break
                time.sleep(0.01)


async def grown(path: Path, size: int) -> None:
    """Return once the file is larger than `size`."""
    for _ in range(500):
        if path.exists() and path.stat().st_size > size:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{path} does not grow")


async def test_calls_and_what_they_answer():
    async with running_envd() as envd:
        client = envd.client()
        await client.wait_healthy(5)
        await client.init(InitRequest(access_token="t", env_vars={"A": "b"}, entropy=os.urandom(32), lifecycle_id="1"))
        metrics = await client.metrics()
        assert metrics.cpu_count > 0
        assert 0 < metrics.mem_used < metrics.mem_total
        result = await client.run("echo $A; echo err >&2; exit 4", "root")
        assert (result.exit_code, result.stdout, result.stderr, result.error) == (4, b"b\n", b"err\n", "exit status 4")
        assert (await client.run("head -c 3000000 /dev/zero", "user")).stdout == bytes(3_000_000)
        with pytest.raises(OperationFailed, match="401"):
            await envd.client("wrong").metrics()
        with pytest.raises(OperationFailed, match="invalid username"):
            await client.run("true", "stranger")
        with pytest.raises(GuestUnresponsive, match="deadline"):
            await client.run("sleep 60", "root", timeout_s=0.5)
        answer = await client.freeze(1)
        assert not answer.frozen
        assert "control group" in answer.reason


async def test_nobody_there():
    client = EnvdClient("127.0.0.1", free_port())
    with pytest.raises(GuestUnresponsive):
        await client.unfreeze()
    started = time.monotonic()
    with pytest.raises(GuestUnresponsive, match=r"within 0\.3 s"):
        await client.wait_healthy(0.3)
    assert time.monotonic() - started < 1


async def test_somebody_else_there():
    """A peer that accepts and says nothing, or nonsense."""
    words = [b""]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words[-1])
        if not words[-1]:
            with suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port := free_port())
    client = EnvdClient("127.0.0.1", port)
    with pytest.raises(GuestUnresponsive):
        await client.unfreeze(timeout_s=0.2)
    for say in (b"nonsense\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\nnot json", b"HTTP/1.0 200 OK\r\n\r\n[]", b"x" * 200_000):
        words.append(say)
        with pytest.raises(GuestUnresponsive):
            await client.metrics(timeout_s=1)
    server.close()


async def test_waiting_ends_when_the_agent_starts():
    port = free_port()
    client = EnvdClient("127.0.0.1", port)
    waiting = asyncio.create_task(client.wait_healthy(20))
    await asyncio.sleep(0.2)
    assert not waiting.done()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 204 No Content\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await asyncio.wait_for(waiting, 0.5)
    server.close()


async def test_frozen_processes_stand_still_and_the_agent_does_not(cgroup):
    async with running_envd("--cgroup", str(cgroup)) as envd:
        client, sandbox = envd.client(), await envd.sandbox()
        ticks = Path(f"/tmp/envd-ticks-{envd.port}")
        handle = await sandbox.commands.run(
            f"while :; do echo >> {ticks}; sleep 0.01; done", background=True, user="root"
        )
        await grown(ticks, 0)
        for _ in range(2):
            assert (await client.freeze(5)).frozen
        frozen_at = ticks.stat().st_size
        starting = asyncio.create_task(client.run("echo started", "root"))
        await asyncio.sleep(0.3)
        assert ticks.stat().st_size == frozen_at
        assert not starting.done()
        assert (await client.metrics()).cpu_count > 0
        await client.init(InitRequest(env_vars={}, thaw=True))
        assert (await starting).stdout == b"started\n"
        await grown(ticks, frozen_at)
        await client.freeze(5)
        assert await sandbox.commands.kill(handle.pid), "even a frozen process can be killed"
        await client.unfreeze()
        ticks.unlink()
