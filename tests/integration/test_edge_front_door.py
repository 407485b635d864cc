"""The node's side of edge: starting, adopting, watching over it."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.support.edge import Server, edge_program, to

from aenv.errors import HostUnsupported, OperationFailed
from aenv.ids import SandboxId
from aenv.ledger import Ledger
from aenv.node.front_door import FrontDoor, Route, ensure_edge
from aenv.node.paths import NodePaths
from aenv.settings import Settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="edge starts as root to become a user of its own")

SANDBOX = SandboxId("iaaa")


class Node:
    """What edge is started with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.chmod(0o711)
        self.settings = self.with_settings()
        self.paths = NodePaths.of(self.settings)
        self.paths.runtime.mkdir()
        self.ledger = Ledger(self.paths.ledger)

    def with_settings(self, **settings: str) -> Settings:
        given = {"home": self.directory / "home", "runtime": self.directory / "run", "listen": "127.0.0.1:0"} | settings
        return Settings(**given)

    @property
    def recorded(self) -> dict[str, int]:
        (entry,) = self.ledger.entries("edge")
        return entry.details

    async def ensure(self, **settings: str) -> FrontDoor:
        return await ensure_edge(self.with_settings(**settings), self.ledger)


@pytest.fixture
async def node(monkeypatch):
    monkeypatch.setenv("AENV_EDGE", edge_program())
    with tempfile.TemporaryDirectory(prefix="aenv-", dir="/tmp") as name:
        node = Node(Path(name))
        yield node
        for entry in node.ledger.entries("edge"):
            with suppress(ProcessLookupError):
                os.kill(entry.details["pid"], signal.SIGKILL)


async def get(front_door: FrontDoor, port: int) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{front_door.listen}") as client:
        return await client.get("/", headers=to(SANDBOX, port))


async def test_its_life(node):
    front_door = await node.ensure(domain="sbx.test")
    pid = node.recorded["pid"]
    server = await Server("iaaa").listen("127.1.0.1")
    assert (await get(front_door, server.port)).status_code == 502
    await front_door.publish(SANDBOX, Route(generation=1, address="127.1.0.1"))
    assert (await get(front_door, server.port)).status_code == 200
    with pytest.raises(OperationFailed, match="generation 1 is known"):
        await front_door.publish(SANDBOX, Route(generation=0, address="127.1.0.2"))
    await front_door.withdraw(SANDBOX, 0)
    assert (await get(front_door, server.port)).status_code == 200, "a late withdrawal changes nothing"
    await front_door.withdraw(SANDBOX, 1)
    assert (await get(front_door, server.port)).status_code == 502
    await front_door.sync({SANDBOX: Route(generation=2, address="127.1.0.1", traffic_token="t")})
    assert (await get(front_door, server.port)).status_code == 403
    uids = (Path(f"/proc/{pid}/status").read_text()).split("Uid:")[1].split()[:4]
    assert uids == [str(node.settings.edge_uid)] * 4
    await front_door.stop()
    await front_door.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert not node.ledger.entries("edge")
    assert not (node.paths.runtime / "edge.sock").exists()
    await server.close()


async def test_secrets_do_not_show():
    assert "s3cret" not in repr(Route(generation=1, address=None, access_token="s3cret", traffic_token="s3cret"))


async def test_the_next_server_adopts_it(node):
    """With streams on it, and without losing a byte or a route."""
    first = await node.ensure()
    pid = node.recorded["pid"]
    server = await Server("iaaa").listen("127.1.0.1")
    half = asyncio.Event()

    async def slowly(exchange):
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf")
        await half.wait()
        await exchange.send(b"half")

    server.handler = slowly
    await first.publish(SANDBOX, Route(generation=1, address="127.1.0.1"))
    asking = asyncio.create_task(get(first, server.port))
    await server.asked.wait()
    await first.close()
    second = await node.ensure()
    assert node.recorded["pid"] == pid
    assert second.listen == first.listen
    await second.sync({SANDBOX: Route(generation=1, address="127.1.0.1")})
    half.set()
    assert (await asking).content == b"halfhalf"
    third = await node.ensure(listen=second.listen)
    assert node.recorded["pid"] == pid, "port 0 asked for, the real port asked for: the same"
    await second.close()
    await third.stop()
    await server.close()


async def test_other_settings_need_another_edge(node):
    first = await node.ensure()
    pid = node.recorded["pid"]
    await first.close()
    second = await node.ensure(domain="sbx.test")
    assert node.recorded["pid"] != pid
    assert not Path(f"/proc/{pid}").exists()
    await second.stop()


async def test_one_that_does_not_answer_is_replaced(node, monkeypatch):
    monkeypatch.setattr("aenv.node.front_door.REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr("aenv.node.front_door.STOP_TIMEOUT_S", 0.3)
    first = await node.ensure()
    pid = node.recorded["pid"]
    await first.close()
    os.kill(pid, signal.SIGSTOP)
    second = await node.ensure()
    assert node.recorded["pid"] != pid
    assert not Path(f"/proc/{pid}").exists()
    await second.stop()


async def test_it_survives_a_server_that_is_killed(node):
    code = (
        "import asyncio, os, sys\n"
        "from aenv.ledger import Ledger\n"
        "from aenv.node.front_door import ensure_edge\n"
        "from aenv.node.paths import NodePaths\n"
        "from aenv.settings import Settings\n"
        "async def main():\n"
        "    settings = Settings(listen='127.0.0.1:0')\n"
        "    front_door = await ensure_edge(settings, Ledger(NodePaths.of(settings).ledger))\n"
        "    print(front_door.listen, flush=True)\n"
        "    os.killpg(0, 9)\n"
        "asyncio.run(main())\n"
    )
    env = os.environ | {"AENV_HOME": str(node.paths.home), "AENV_RUNTIME": str(node.paths.runtime)}
    command = [sys.executable, "-c", code]
    result = await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, text=True, start_new_session=True, check=False
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    front_door = await node.ensure()
    assert front_door.listen == result.stdout.strip()
    await front_door.stop()


async def test_one_that_dies_is_started_again_with_its_routes(node):
    front_door = await node.ensure()
    server = await Server("iaaa").listen("127.1.0.1")
    await front_door.publish(SANDBOX, Route(generation=1, address="127.1.0.1"))
    listen, pid = front_door.listen, node.recorded["pid"]
    os.kill(pid, signal.SIGKILL)
    # Told while it is down: it holds all the same.
    await front_door.publish(SandboxId("ibbb"), Route(generation=1, address="127.1.0.1"))
    assert node.recorded["pid"] != pid
    assert front_door.listen == listen
    assert (await get(front_door, server.port)).status_code == 200
    async with httpx.AsyncClient(base_url=f"http://{listen}") as client:
        assert (await client.get("/", headers=to("ibbb", server.port))).status_code == 200
    await front_door.stop()
    await server.close()


async def test_an_address_in_use(node):
    other = await Server().listen("127.0.0.1")
    with pytest.raises(HostUnsupported, match="in use") as raised:
        await node.ensure(listen=f"127.0.0.1:{other.port}")
    assert "AENV_LISTEN" in raised.value.hint
    assert not node.ledger.entries("edge")
    await other.close()


async def test_a_program_that_is_missing(node, monkeypatch):
    monkeypatch.setenv("AENV_EDGE", "/nowhere/edge")
    with pytest.raises(OperationFailed, match="cannot be started"):
        await node.ensure()
