"""The official SDK, unchanged, against the API on a loopback socket."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from e2b import AsyncSandbox, Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import (
    AuthenticationException,
    GuestUnresponsiveException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    ServiceBusyException,
)

from aenv import errors
from aenv.api.app import create_app
from aenv.clock import SystemClock
from aenv.settings import Settings
from aenv.testing.fake_node import FakeNode

KEY = "e2b_" + "0123456789" * 4


class Served:
    """The API of a fake node on a free port, in a thread of its own, so that the synchronous SDK may block."""

    def __init__(self, home: Path) -> None:
        self.node = FakeNode(SystemClock())
        app = create_app(self.node, settings=Settings(home=home), api_key=KEY)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.options: Any = {"api_key": KEY, "api_url": f"http://127.0.0.1:{self._socket.getsockname()[1]}"}
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_until_complete(self._server.serve([self._socket]))
        self.loop.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def test_a_life(served: Served) -> None:
    sandbox = Sandbox.create(
        timeout=120, metadata={"run": "a b=c&d"}, envs={"A": "1"}, allow_internet_access=False, **served.options
    )
    (request,) = served.node.requests
    assert (request.timeout_s, request.metadata, request.env) == (120, {"run": "a b=c&d"}, {"A": "1"})
    assert (request.secure, request.policy.internet) == (True, False)

    info = sandbox.get_info()
    assert (info.sandbox_id, info.state, info.metadata) == (sandbox.sandbox_id, SandboxState.RUNNING, request.metadata)
    assert info.end_at - info.started_at == timedelta(seconds=120)
    assert (info.cpu_count, info.memory_mb) == (2, 1024)

    sandbox.set_timeout(30)
    assert sandbox.get_info().end_at < datetime.now(UTC) + timedelta(seconds=31)

    assert sandbox.pause() is True
    assert sandbox.pause() is False
    assert Sandbox.get_info(sandbox.sandbox_id, **served.options).state == SandboxState.PAUSED
    again = Sandbox.connect(sandbox.sandbox_id, timeout=60, **served.options)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again.get_info().state == SandboxState.RUNNING
    assert Sandbox.connect(sandbox.sandbox_id, **served.options).get_info().state == SandboxState.RUNNING

    assert sandbox.kill() is True
    assert sandbox.kill() is False
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(sandbox.sandbox_id, **served.options)
    with pytest.raises(SandboxNotFoundException):
        sandbox.set_timeout(1)
    with pytest.raises(SandboxNotFoundException):
        sandbox.pause()


def test_lifecycle_options(served: Served) -> None:
    kill = Sandbox.create(lifecycle={"on_timeout": "kill"}, **served.options)
    assert kill.get_info().lifecycle == {"on_timeout": "kill", "auto_resume": False}
    plain = Sandbox.create(**served.options)
    assert plain.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": False}
    refused: list[Any] = [
        {"on_timeout": "pause", "auto_resume": True},
        {"on_timeout": {"action": "pause", "keep_memory": False}},
    ]
    for lifecycle in refused:
        with pytest.raises(SandboxException, match="not supported yet"):
            Sandbox.create(lifecycle=lifecycle, **served.options)


def test_network_options(served: Served) -> None:
    network: Any = {"allow_out": ["1.1.1.1"], "deny_out": ["0.0.0.0/0"], "allow_public_traffic": False}
    sandbox = Sandbox.create(network=network, **served.options)
    assert sandbox.traffic_access_token == f"traffic-{sandbox.sandbox_id}"
    (request,) = served.node.requests
    assert (request.policy.allow_out, request.policy.deny_out) == (("1.1.1.1/32",), ("0.0.0.0/0",))
    sandbox.get_info()
    with pytest.raises(SandboxException, match="not supported yet"):
        sandbox.update_network({"deny_out": []})


def test_lists(served: Served) -> None:
    ids = [
        Sandbox.create(metadata={"n": str(number), "a b": "c=d&ä"}, **served.options).sandbox_id for number in range(3)
    ]
    Sandbox.pause(ids[1], **served.options)

    def listed(**arguments: Any) -> list[str]:
        paginator = Sandbox.list(**arguments, **served.options)
        found: list[str] = []
        while paginator.has_next:
            found += [info.sandbox_id for info in paginator.next_items()]
        return found

    assert listed() == listed(limit=1) == ids[::-1]
    assert listed(order="asc", limit=2) == ids
    assert listed(query=SandboxQuery(state=[SandboxState.PAUSED])) == [ids[1]]
    assert listed(query=SandboxQuery(state=[SandboxState.PAUSED, SandboxState.RUNNING])) == ids[::-1]
    assert listed(query=SandboxQuery(metadata={"a b": "c=d&ä", "n": "2"})) == [ids[2]]
    assert listed(query=SandboxQuery(metadata={"n": "7"})) == []
    with pytest.raises(SandboxException, match="400"):
        listed(next_token="nonsense")


def test_fork(served: Served) -> None:
    source = Sandbox.create(**served.options)
    served.node.fork_errors = {1: errors.NoCapacity("no memory left")}
    first, second, third = source.fork(count=3, timeout=60)
    assert isinstance(second, ServiceBusyException)
    assert isinstance(first, Sandbox)
    assert isinstance(third, Sandbox)
    assert len({source.sandbox_id, first.sandbox_id, third.sandbox_id}) == 3
    first.kill()
    source.kill()
    with pytest.raises(SandboxNotFoundException):
        source.fork()


def test_snapshots(served: Served) -> None:
    source = Sandbox.create(**served.options)
    snapshot = source.create_snapshot(name="set-up")
    unnamed = source.create_snapshot()
    assert snapshot.names == ["set-up"]
    source.kill()
    ids = [info.snapshot_id for info in Sandbox.list_snapshots(**served.options).next_items()]
    assert set(ids) == {snapshot.snapshot_id, unnamed.snapshot_id}
    by_sandbox = Sandbox.list_snapshots(sandbox_id=source.sandbox_id, limit=1, **served.options)
    assert len(by_sandbox.next_items()) == 1
    assert by_sandbox.has_next
    by_name = Sandbox.list_snapshots(name="set-up", **served.options)
    assert [info.snapshot_id for info in by_name.next_items()] == [snapshot.snapshot_id]
    assert Sandbox.create(snapshot.snapshot_id, **served.options).get_info().name == "set-up"
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **served.options) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **served.options) is False
    assert Sandbox.delete_snapshot("team/none:default", **served.options) is False


def test_error_classes(served: Served) -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create(**{**served.options, "api_key": "e2b_" + "f" * 40})
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("nothing", **served.options)
    with pytest.raises(SandboxException, match="400"):
        Sandbox.create(timeout=0, **served.options)
    served.node.fail["create"] = errors.NoCapacity("full", retry_after_s=60)
    with pytest.raises(ServiceBusyException, match="full"):
        Sandbox.create(**served.options)
    served.node.fail["create"] = errors.StorageFull("disk full")
    with pytest.raises(SandboxException, match="507: disk full"):
        Sandbox.create(**served.options)
    assert served.node.calls == ["create"] * 3, "none of these was tried again"
    served.node.fail["create"] = errors.TooManyStarts("wait", retry_after_s=60)
    with pytest.raises(RateLimitException, match="wait"):
        Sandbox.create(request_timeout=5, **served.options)
    sandbox = Sandbox.create(**served.options)
    served.node.fail["pause with healthy guest"] = errors.GuestUnresponsive("no answer")
    with pytest.raises(GuestUnresponsiveException, match="no answer"):
        sandbox.pause(strict=True)
    with pytest.raises(SandboxException, match="not supported yet"):
        sandbox.pause(keep_memory=False)


def test_a_start_that_is_turned_away_is_tried_again(served: Served) -> None:
    served.node.fail["create"] = errors.TooManyStarts("wait", retry_after_s=1)
    Sandbox.create(idempotency_key="one", **served.options)
    assert served.node.calls == ["create", "create"]
    Sandbox.create(idempotency_key="one", **served.options)
    assert len(served.node.requests) == 1


def test_a_chunked_body(served: Served) -> None:
    """What JavaScript SDKs send."""

    def chunks() -> Iterator[bytes]:
        yield b'{"templateID":'
        yield b'"base"}'

    headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
    response = httpx.post(f"{served.options['api_url']}/v2/sandboxes", content=chunks(), headers=headers)
    assert response.status_code == 201


def test_a_client_that_hangs_up_stops_nothing(served: Served) -> None:
    sandbox = Sandbox.create(**served.options)
    release = served.node.hold["pause"] = asyncio.Event()
    url = f"{served.options['api_url']}/sandboxes/{sandbox.sandbox_id}/pause"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, headers={"X-API-Key": KEY}, timeout=0.3)
    assert sandbox.get_info().state == SandboxState.RUNNING
    del served.node.hold["pause"]
    served.loop.call_soon_threadsafe(release.set)
    deadline = time.monotonic() + 10
    while sandbox.get_info().state != SandboxState.PAUSED:
        assert time.monotonic() < deadline


async def test_the_asynchronous_client(served: Served) -> None:
    sandbox = await AsyncSandbox.create(timeout=60, metadata={"a": "b"}, **served.options)
    assert (await sandbox.get_info()).metadata == {"a": "b"}
    await sandbox.set_timeout(30)
    snapshot = await sandbox.create_snapshot(name="set-up")
    children = await sandbox.fork(count=2)
    assert all(isinstance(child, AsyncSandbox) for child in children)
    assert await sandbox.pause() is True
    assert await sandbox.pause() is False
    assert (await AsyncSandbox.connect(sandbox.sandbox_id, timeout=60, **served.options)).sandbox_id
    paginator = AsyncSandbox.list(query=SandboxQuery(metadata={"a": "b"}), limit=2, **served.options)
    assert len(await paginator.next_items()) == 2
    assert len(await paginator.next_items()) == 1
    assert not paginator.has_next
    found = await AsyncSandbox.list_snapshots(**served.options).next_items()
    assert [info.snapshot_id for info in found] == [snapshot.snapshot_id]
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id, **served.options) is True
    assert await sandbox.kill() is True
    with pytest.raises(NotFoundException):
        await sandbox.get_info()
    many = await asyncio.gather(*(AsyncSandbox.create(**served.options) for _ in range(20)))
    assert len({each.sandbox_id for each in many}) == 20
