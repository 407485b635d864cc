"""Bodies, streams and upgrades through edge: nothing is held back, nothing piles up, nothing broken looks whole."""

import asyncio
import base64
import hashlib
import os
import socket
import time
from contextlib import suppress

import httpx
import pytest
from tests.support.edge import CHUNKED_END, Exchange, RawClient, Server, raw_to, running_edge, to

MIB = 1 << 20


@pytest.fixture
async def edge():
    async with running_edge() as edge:
        yield edge


@pytest.fixture
async def sandbox(edge):
    server = await Server("iaaa").listen("127.1.0.1")
    await edge.route("iaaa", "127.1.0.1")
    yield server
    await server.close()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_events_pass_one_by_one(edge, sandbox):
    """Each event only once the one before has arrived: nothing may buffer."""
    arrived = asyncio.Semaphore(1)

    async def events(exchange: Exchange) -> None:
        await exchange.send(CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-type: text/event-stream\r\n\r\n"))
        for number in range(100):
            await arrived.acquire()
            await exchange.chunk(b"data: %d\n\n" % number)
        await exchange.send(CHUNKED_END)

    sandbox.handler = events
    got = []
    async with edge.client.stream("GET", "/events", headers=to("iaaa", sandbox.port)) as response:
        assert response.headers["content-type"] == "text/event-stream"
        async for line in response.aiter_lines():
            if line:
                got.append(line)
                arrived.release()
    assert got == [f"data: {number}" for number in range(100)]


async def test_both_ways_at_once(edge, sandbox):
    """An interactive call: the answer begins while the request is being sent."""

    async def echo(exchange: Exchange) -> None:
        await exchange.send(CHUNKED)
        async for piece in exchange.body():
            await exchange.chunk(piece.upper())
        await exchange.send(CHUNKED_END)

    sandbox.handler = echo
    client = await edge.raw()
    await client.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n")
    assert (await client.head()).headers["transfer-encoding"] == "chunked"
    for word in (b"one", b"two", b"three"):
        await client.send(b"%x\r\n%s\r\n" % (len(word), word))
        assert await client.chunk() == word.upper()
    await client.send(CHUNKED_END)
    assert await client.chunk() == b""
    client.writer.close()


async def test_head_and_empty_answers(edge, sandbox):
    async def handler(exchange: Exchange) -> None:
        if exchange.request.method == "HEAD":
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 12345\r\netag: e\r\n\r\n")
        elif exchange.request.target == "/304":
            await exchange.send(b"HTTP/1.1 304 Not Modified\r\netag: e\r\n\r\n")
        else:
            await exchange.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    sandbox.handler = handler
    headers = to("iaaa", sandbox.port)
    head = await edge.client.head("/", headers=headers)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "12345", b"")
    assert (await edge.client.get("/304", headers=headers)).status_code == 304
    assert (await edge.client.delete("/", headers=headers)).status_code == 204
    assert sandbox.connections == 1


async def test_continue_comes_only_when_someone_wants_the_body(edge, sandbox):
    expect = b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n"
    client = await edge.raw()
    await client.send(expect + raw_to("iaaa", sandbox.port) + b"\r\n")
    assert (await client.head()).status == 100
    await client.send(b"body")
    answer = await client.answer()
    assert answer.status == 200
    assert sandbox.requests[-1].body == b"body"
    assert sandbox.requests[-1].header("expect") is None
    client.writer.close()
    assert (await edge.exchange(expect + raw_to("inone", 80) + b"\r\n")).status == 502


async def test_an_answer_that_comes_before_the_body_is_sent(edge, sandbox):
    """A server that refuses a large upload and closes: the client must get to read why."""

    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b"too large", "413 Content Too Large", "connection: close\r\n")
        exchange.writer.close()

    sandbox.handler = refuse
    size = 64 * MIB
    for sandbox_id, status in [("iaaa", 413)] * 20 + [("inone", 502)]:
        client = await edge.raw()
        await client.send(
            b"PUT / HTTP/1.1\r\nContent-Length: %d\r\n" % size + raw_to(sandbox_id, sandbox.port) + b"\r\n"
        )

        async def upload(client: RawClient = client) -> None:
            with suppress(ConnectionError):
                for _ in range(size // MIB):
                    await client.send(bytes(MIB))

        uploading = asyncio.create_task(upload())
        assert (await asyncio.wait_for(client.answer(), 10)).status == status
        uploading.cancel()
        await asyncio.wait([uploading])
        client.writer.close()


async def test_trailers_pass_to_those_who_ask(edge, sandbox):
    async def trailing(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.send(CHUNKED.replace(b"\r\n\r\n", b"\r\ntrailer: x-sum\r\n\r\n"))
        await exchange.chunk(b"data")
        await exchange.send(b"0\r\nx-sum: 42\r\n\r\n")

    sandbox.handler = trailing
    client = await edge.raw()
    await client.send(b"GET / HTTP/1.1\r\nTE: trailers\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n")
    await client.head()
    assert await client.chunk() == b"data"
    assert await client.reader.readuntil(b"\r\n\r\n") == b"0\r\nx-sum: 42\r\n\r\n"
    client.writer.close()


async def test_http_1_0_clients(edge, sandbox):
    answer = await edge.exchange(b"GET / HTTP/1.0\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n")
    assert answer.status == 200


async def test_http_2_clients(edge, sandbox):
    async def handler(exchange: Exchange) -> None:
        if exchange.request.target == "/hang":
            await exchange.send(CHUNKED)
            await exchange.chunk(b"begun")
            await asyncio.Event().wait()
        await exchange.send(CHUNKED)
        async for piece in exchange.body():
            await exchange.chunk(piece)
        await exchange.send(CHUNKED_END)

    sandbox.handler = handler
    other = await Server("ibbb").listen("127.1.0.2", sandbox.port)
    await edge.route("ibbb", "127.1.0.2")
    async with httpx.AsyncClient(base_url=edge.url, http1=False, http2=True) as client:
        assert (await client.get("/", headers=to("inone", 80))).status_code == 502
        data = os.urandom(3 * MIB)
        response = await client.post("/", headers=to("iaaa", sandbox.port), content=data)
        assert (response.http_version, response.content) == ("HTTP/2", data)
        assert sandbox.requests[-1].header("host") == edge.listen
        async with client.stream("GET", "/hang", headers=to("iaaa", sandbox.port)) as response:
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"begun"
            await edge.unroute("iaaa")
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
        # Only the stream was cut: the connection is shared with other sandboxes.
        assert (await client.get("/", headers=to("ibbb", sandbox.port))).json()["server"] == "ibbb"
    await other.close()


async def test_large_bodies_arrive_whole(edge, sandbox):
    digests = []

    async def digest(exchange: Exchange) -> None:
        digest = hashlib.sha256()
        async for piece in exchange.body():
            digest.update(piece)
        digests.append(digest.hexdigest())
        await exchange.send(f"HTTP/1.1 200 OK\r\ncontent-length: {len(data)}\r\n\r\n".encode())
        await exchange.send(data)

    data = os.urandom(32 * MIB)
    sandbox.handler = digest

    async def pieces():
        for offset in range(0, len(data), 777_777):
            yield data[offset : offset + 777_777]

    for content in (data, pieces()):
        response = await edge.client.post("/", headers=to("iaaa", sandbox.port), content=content, timeout=60)
        assert response.content == data
    assert digests == [hashlib.sha256(data).hexdigest()] * 2


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_memory_stays_flat_while_a_slow_side_takes_its_time(edge, sandbox, direction):
    """256 MiB to a reader that begins a second late and goes on in steps."""
    size, block = 256 * MIB, bytes(MIB)
    slow_s = 0.01

    async def down(exchange: Exchange) -> None:
        await exchange.send(f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n".encode())
        for _ in range(size // MIB):
            await exchange.send(block)

    async def up(exchange: Exchange) -> None:
        await asyncio.sleep(1)
        taken = 0
        async for piece in exchange.body():
            taken += len(piece)
            if taken % (4 * MIB) < len(piece):
                await asyncio.sleep(slow_s)
        await exchange.answer(str(taken).encode())

    sandbox.handler = down if direction == "down" else up
    before, most = edge.resident_bytes(), 0
    client = await edge.raw()
    head = b"GET / HTTP/1.1\r\n" if direction == "down" else b"PUT / HTTP/1.1\r\nContent-Length: %d\r\n" % size
    await client.send(head + raw_to("iaaa", sandbox.port) + b"\r\n")
    if direction == "down":
        await asyncio.sleep(1)
        await client.head()
        for _ in range(size // (4 * MIB)):
            await client.reader.readexactly(4 * MIB)
            most = max(most, edge.resident_bytes())
            await asyncio.sleep(slow_s)
    else:
        for _ in range(size // MIB):
            await client.send(block)
            most = max(most, edge.resident_bytes())
        assert (await client.answer()).body == str(size).encode()
    client.writer.close()
    assert most - before < 4 * MIB


async def websocket_echo(exchange: Exchange) -> None:
    """RFC 6455's handshake, then bytes back as they come; what they frame is no proxy's business."""
    key = exchange.request.header("sec-websocket-key")
    accept = base64.b64encode(hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()).decode()
    await exchange.send(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept.encode() + b"\r\nSec-WebSocket-Protocol: chat\r\n\r\nhello"
    )
    while data := await exchange.reader.read(1 << 16):
        await exchange.send(data)
    exchange.writer.write_eof()


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


async def test_websocket(edge, sandbox):
    sandbox.handler = websocket_echo
    client = await edge.raw()
    await client.send(UPGRADE + raw_to("iaaa", sandbox.port) + b"\r\nearly")
    answer = await client.head()
    assert answer.status == 101
    assert answer.headers["upgrade"] == "websocket"
    assert answer.headers["connection"].lower() == "upgrade"
    assert answer.headers["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert answer.headers["sec-websocket-protocol"] == "chat"
    assert await client.reader.readexactly(10) == b"helloearly"
    for _ in range(10_000):
        await client.send(b"ping")
        assert await client.reader.readexactly(4) == b"ping"
    block = os.urandom(MIB)
    sending = asyncio.create_task(client.send(block))
    assert await client.reader.readexactly(MIB) == block
    await sending
    assert await edge.metric("tunnels") == 1
    # Each side ends for itself.
    client.writer.write_eof()
    assert await client.reader.read() == b""
    client.writer.close()


async def test_an_upgrade_may_be_refused(edge, sandbox):
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b"no", "426 Upgrade Required")

    sandbox.handler = refuse
    answer = await edge.exchange(UPGRADE + raw_to("iaaa", sandbox.port) + b"\r\n")
    assert (answer.status, answer.body) == (426, b"no")
    answer = await edge.exchange(UPGRADE + raw_to("inone", sandbox.port) + b"\r\n")
    assert answer.status == 502


async def test_a_switch_nobody_asked_for(edge, sandbox):
    async def switch(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n")

    sandbox.handler = switch
    answer = await edge.exchange(b"GET / HTTP/1.1\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n")
    assert answer.status == 502


async def test_any_protocol_and_the_control_plane_too(edge):
    control = await Server("control").listen_unix(edge.control_socket)
    control.handler = websocket_echo
    client = await edge.raw()
    await client.send(UPGRADE.replace(b"websocket", b"raw-thing") + b"Host: h\r\n\r\n")
    assert (await client.head()).status == 101
    assert await client.reader.readexactly(5) == b"hello"
    client.writer.close()
    await control.close()


async def begin(edge, sandbox, kind: str):
    """A client in the middle of an exchange of some kind."""

    async def handler(exchange: Exchange) -> None:
        if kind == "chunked":
            await exchange.send(CHUNKED)
            await exchange.chunk(b"begun")
        elif kind == "length":
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbegun")
        elif kind == "until closed":
            await exchange.send(b"HTTP/1.0 200 OK\r\n\r\nbegun")
        elif kind == "upload":
            await anext(exchange.body())
        elif kind == "client reads nothing":
            await exchange.send(CHUNKED)
            while True:
                await exchange.chunk(bytes(MIB))
        reached.set()
        await asyncio.Event().wait()

    reached = asyncio.Event()
    sandbox.handler = websocket_echo if kind == "tunnel" else handler
    client = await edge.raw()
    if kind == "tunnel":
        await client.send(UPGRADE + raw_to("iaaa", sandbox.port) + b"\r\n")
        await client.reader.readuntil(b"hello")
    else:
        head = b"PUT / HTTP/1.1\r\nContent-Length: 100\r\n" if kind == "upload" else b"GET / HTTP/1.1\r\n"
        await client.send(head + raw_to("iaaa", sandbox.port) + b"\r\n" + b"x" * 10 * (kind == "upload"))
        if kind == "client reads nothing":
            client.writer.transport.pause_reading()
            await asyncio.sleep(0.5)
        else:
            await reached.wait()
        if kind in ("chunked", "length", "until closed"):
            await client.reader.readuntil(b"begun")
    return client


KINDS = ["no answer yet", "chunked", "length", "until closed", "upload", "client reads nothing", "tunnel"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cause", ["deleted", "new generation", "paused", "not in the table"])
async def test_a_route_that_ends_cuts_its_clients(edge, sandbox, kind, cause):
    client = await begin(edge, sandbox, kind)
    began = time.monotonic()
    match cause:
        case "deleted":
            await edge.unroute("iaaa")
        case "new generation":
            await edge.route("iaaa", "127.1.0.1", generation=2)
        case "paused":
            await edge.route("iaaa", None, generation=1, state="paused")
        case "not in the table":
            await edge.admin.put("/routes", json={"routes": {}})
    if kind == "client reads nothing":
        client.writer.transport.resume_reading()
    if kind in ("no answer yet", "upload"):
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 2)
        assert head.startswith(b"HTTP/1.1 502 ")
        assert b"was not found" in await client.reader.readuntil(b"}")
    else:
        assert await asyncio.wait_for(client.end(), 2) == "reset"
    assert time.monotonic() - began < 1
    await upstream_ended(sandbox)


async def upstream_ended(sandbox: Server) -> None:
    """Returns once edge has closed every connection to the sandbox."""
    async with asyncio.timeout(2):
        while not all(is_closed_by_peer(writer) for writer in sandbox.open):
            await asyncio.sleep(0.01)


def is_closed_by_peer(writer: asyncio.StreamWriter) -> bool:
    """Also when unread bytes keep the end from being read."""
    connection = writer.get_extra_info("socket")
    established = 1
    return connection.fileno() < 0 or connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != established


@pytest.mark.parametrize("kind", ["chunked", "length"])
async def test_an_answer_that_breaks_off_is_not_whole(edge, sandbox, kind):
    client = await begin(edge, sandbox, kind)
    sandbox.hang_up()
    assert await asyncio.wait_for(client.end(), 2) == "reset"


@pytest.mark.parametrize("kind", ["no answer yet", "chunked", "tunnel"])
async def test_a_client_that_leaves_is_noticed(edge, sandbox, kind):
    """The sandbox's connection ends too, so that a server there can stop its work."""
    client = await begin(edge, sandbox, kind)
    assert not any(is_closed_by_peer(writer) for writer in sandbox.open)
    client.writer.close()
    await upstream_ended(sandbox)


async def test_finished_answers_are_not_cut(edge, sandbox):
    """A client that has its answer keeps its connection, and other sandboxes' clients theirs."""
    other = await Server("ibbb").listen("127.1.0.2", sandbox.port)
    await edge.route("ibbb", "127.1.0.2")
    client = await edge.raw()
    request = b"GET / HTTP/1.1\r\n"
    await client.send(request + raw_to("iaaa", sandbox.port) + b"\r\n")
    assert (await client.answer()).status == 200
    await edge.unroute("iaaa")
    for sandbox_id, status in (("iaaa", 502), ("ibbb", 200), ("iaaa", 502)):
        await client.send(request + raw_to(sandbox_id, sandbox.port) + b"\r\n")
        assert (await client.answer()).status == status
    client.writer.close()
    await other.close()
