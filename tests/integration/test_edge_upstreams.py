"""Connections to sandboxes: used again only for whom they were opened, and no client suffers when one was stale."""

import asyncio
import socket
import time
from contextlib import suppress

import httpx
import pytest
from tests.support.edge import Exchange, Server, raw_to, running_edge, to


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


async def test_connections_are_used_again(edge, sandbox):
    for _ in range(50):
        assert (await edge.client.post("/", headers=to("iaaa", sandbox.port), content=b"x")).status_code == 200
    assert sandbox.connections == 1
    assert await edge.metric("upstream_reuses_total") == 49


async def test_a_generation_has_its_own_connections(edge, sandbox):
    for generation in range(1, 5):
        await edge.route("iaaa", "127.1.0.1", generation=generation)
        for _ in range(3):
            await edge.client.get("/", headers=to("iaaa", sandbox.port))
        assert sandbox.connections == generation
        assert len(sandbox.open) == 1


async def test_a_recycled_address_never_gets_another_sandboxs_request(edge):
    """Sandboxes come and go on one address while keep-alive clients go on asking for all of them."""
    probe = await Server().listen("127.1.0.9")
    rounds, port = 60, probe.port
    await probe.close()
    served, running = 0, True
    wrong: list[tuple[str, int, str]] = []

    async def ask(sandbox_id: str) -> None:
        nonlocal served
        async with httpx.AsyncClient(base_url=edge.url) as client:
            while running:
                with suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):  # it was cut
                    response = await client.get("/", headers=to(sandbox_id, port) | {"X-For": sandbox_id})
                    if response.status_code == 200 and response.json()["server"] == sandbox_id:
                        served += 1
                    elif response.status_code != 502 or "was not found" not in response.text:
                        wrong.append((sandbox_id, response.status_code, response.text))

    async def occupied(sandbox_id: str, generation: int) -> None:
        """One life of a sandbox on the address."""
        server = await Server(sandbox_id).listen("127.1.0.9", port)
        assert (await edge.route(sandbox_id, "127.1.0.9", generation=generation)).status_code == 204
        await asyncio.wait_for(server.asked.wait(), 5)
        assert (await edge.unroute(sandbox_id, generation)).status_code == 204
        assert {request.header("x-for") for request in server.requests} == {sandbox_id}
        await server.close()

    names = ["iaaa", "ibbb", "iccc"]
    clients = [asyncio.create_task(ask(name)) for name in names for _ in range(3)]
    for number in range(rounds):
        await occupied(names[number % len(names)], number + 1)
        assert not wrong
        assert not [client for client in clients if client.done()]
    running = False
    await asyncio.gather(*clients)
    assert served >= rounds


async def test_a_connection_closed_while_idle_costs_nothing(edge, sandbox):
    """A server with a short keep-alive: it closes after each answer without having said so."""

    async def answer_and_close(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.answer(b"ok")
        exchange.writer.close()

    sandbox.handler = answer_and_close
    for _ in range(200):
        assert (await edge.client.get("/", headers=to("iaaa", sandbox.port))).content == b"ok"


async def test_a_stale_connection_is_survived_when_that_is_safe(edge, sandbox):
    """The server closes just as the next request arrives: the worst moment."""

    async def stale(exchange: Exchange) -> None:
        number = exchange.request.connection
        if [request.connection for request in sandbox.requests].count(number) > 1:
            exchange.writer.close()
            return
        await exchange.read_body()
        await exchange.answer(b"ok")

    sandbox.handler = stale
    headers = to("iaaa", sandbox.port)
    for method in ("GET", "HEAD", "DELETE", "OPTIONS"):
        for _ in range(2):
            assert (await edge.client.request(method, "/", headers=headers)).status_code == 200
    assert await edge.metric("upstream_retries_total") >= 4
    # What may have been acted on is not sent twice.
    sandbox.requests.clear()
    statuses = [(await edge.client.post("/", headers=headers, content=b"x")).status_code for _ in range(2)]
    assert sorted(statuses) == [200, 502]
    assert len(sandbox.requests) == 2


async def test_what_cannot_be_repeated_takes_no_connection_that_was_idle_for_long(edge, sandbox):
    async def post() -> None:
        assert (await edge.client.post("/", headers=to("iaaa", sandbox.port), content=b"x")).status_code == 200

    await post()
    await post()
    assert sandbox.connections == 1
    await asyncio.sleep(1.1)
    await post()
    assert sandbox.connections == 2
    await edge.client.get("/", headers=to("iaaa", sandbox.port))
    assert sandbox.connections == 2


@pytest.fixture
def deaf_port():
    """A port of 127.1.0.1 whose queue is full: connecting to it waits."""
    with socket.socket() as listener:
        listener.bind(("127.1.0.1", 0))
        listener.listen(0)
        waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
            waiting.append(client)
        yield listener.getsockname()[1]
        for client in waiting:
            client.close()


async def test_connecting_gives_up_after_a_while(edge, sandbox, deaf_port):
    began = time.monotonic()
    response = await edge.client.get("/", headers=to("iaaa", deaf_port), timeout=10)
    assert 4.5 < time.monotonic() - began < 6.5
    assert response.json()["message"] == "The sandbox is running but port is not open"


async def test_a_route_that_ends_while_connecting_is_not_found(edge, sandbox, deaf_port):
    asking = asyncio.create_task(edge.client.get("/", headers=to("iaaa", deaf_port)))
    await asyncio.sleep(0.2)
    await edge.unroute("iaaa")
    response = await asyncio.wait_for(asking, 1)
    assert (response.status_code, response.json()["message"]) == (502, "The sandbox was not found")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * 300_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
    ],
)
async def test_an_answer_that_is_none(edge, sandbox, answer):
    """Neither gone nor closed: SDKs must not take the sandbox for dead or the port for unused."""

    async def say(exchange: Exchange) -> None:
        await exchange.send(answer)
        exchange.writer.close()

    sandbox.handler = say
    response = await edge.client.get("/", headers=to("iaaa", sandbox.port))
    assert response.status_code == 502
    body = response.json()
    assert (body["sandboxId"], body["port"], body["code"]) == ("iaaa", sandbox.port, 502)
    assert "was not found" not in body["message"]
    assert "port is not open" not in body["message"]


async def test_length_and_chunks_in_an_answer(edge, sandbox):
    """Both: the chunks count, and the client is told only of them."""

    async def both(exchange: Exchange) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        )

    sandbox.handler = both
    client = await edge.raw()
    await client.send(b"GET / HTTP/1.1\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n")
    head = await client.head()
    assert "content-length" not in head.headers
    assert await client.chunk() == b"hello"
    client.writer.close()
