"""Clients that mean harm, and a machine that is short of things."""

import asyncio
import json
import signal
import time

import pytest
from tests.support.edge import CHUNKED_END, Exchange, Server, edge_program, raw_to, running_edge, to


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


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 1\r\nContent-Length: 2\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 5, 6\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Content-Length : 5\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"X: a\r\n b\r\n",
        b"X: a\0b\r\n",
        b"X: a\rb\r\n",
        b"X\0: a\r\n",
        b"X a\r\n",
        b": a\r\n",
        b"Host: other\r\n",
    ],
)
async def test_ambiguous_requests_are_refused(edge, sandbox, lines):
    client = await edge.raw()
    await client.send(b"POST / HTTP/1.1\r\n" + lines + raw_to("iaaa", sandbox.port) + b"\r\n0\r\n\r\n" + SMUGGLED)
    assert (await client.answer()).status == 400
    await asyncio.wait_for(client.end(), 5)
    assert not sandbox.requests
    client.writer.close()


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /\0 HTTP/1.1",
        b"GET / x HTTP/1.1",
        b"GET / HTTP/3.1",
        b"GET",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"G@T / HTTP/1.1",
        b"GET http:// HTTP/1.1",
        b"PRI * HTTP/2.0\r\n\r\nXX",
    ],
)
async def test_what_is_no_request(edge, sandbox, request_line):
    client = await edge.raw()
    await client.send(request_line + b"\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n")
    end = asyncio.create_task(client.reader.read())
    answer = await asyncio.wait_for(end, 5)
    assert not answer or b"HTTP/1.1 4" in answer[:12] or answer[3:5] in (b"\x04\x00", b"\x07\x00"), answer
    assert not sandbox.requests
    client.writer.close()


@pytest.mark.parametrize("order", ["length first", "coding first"])
async def test_length_and_coding_cannot_smuggle(edge, sandbox, order):
    """With both, the coding counts; what the length would have hidden is the next request, or nothing."""
    both = [b"Content-Length: %d\r\n" % (5 + len(SMUGGLED)), b"Transfer-Encoding: chunked\r\n"]
    lines = b"".join(both if order == "length first" else reversed(both))
    client = await edge.raw()
    await client.send(
        b"POST /first HTTP/1.1\r\n" + lines + raw_to("iaaa", sandbox.port) + b"\r\n" + CHUNKED_END + SMUGGLED
    )
    assert (await client.answer()).status in (200, 400)
    await asyncio.sleep(0.2)
    assert [request.target for request in sandbox.requests] in ([], ["/first"])
    for request in sandbox.requests:
        assert (request.header("content-length"), request.body) in ((None, b""), ("0", b""))
    client.writer.close()


async def test_broken_chunks_end_the_upload_not_the_sandbox(edge, sandbox):
    for chunk in (b"zz\r\n", b"fffffffffffffffff\r\n", b"5\r\nhelloXX", b"-1\r\n", b"5 5\r\nhello\r\n"):
        client = await edge.raw()
        await client.send(
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n" + chunk
        )
        await asyncio.wait_for(client.end(), 5)
        client.writer.close()
    assert (await edge.client.get("/", headers=to("iaaa", sandbox.port))).status_code == 200


async def test_a_broken_body_is_the_clients_fault(edge, sandbox):
    control = await Server("api").listen_unix(edge.control_socket)
    for where in (raw_to("iaaa", sandbox.port), b"Host: api\r\n"):
        answer = await edge.exchange(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + where + b"\r\n5\r\nhelloXX")
        assert (answer.status, json.loads(answer.body)["code"]) == (400, 400)
    await control.close()


async def test_pipelined_requests_are_answered_in_order(edge, sandbox):
    client = await edge.raw()
    one = b"POST /%d HTTP/1.1\r\nContent-Length: 1\r\n" + raw_to("iaaa", sandbox.port) + b"\r\nx"
    await client.send(b"".join(one % number for number in range(20)))
    targets = [json.loads((await client.answer()).body)["target"] for _ in range(20)]
    assert targets == [f"/{number}" for number in range(20)]
    client.writer.close()


@pytest.mark.parametrize("head", [b"X: " + b"x" * 300_000, b"\r\n".join(b"X: y" for _ in range(500))])
async def test_heads_are_bounded(edge, head):
    assert (await edge.exchange(b"GET / HTTP/1.1\r\nHost: h\r\n" + head + b"\r\n\r\n")).status == 431


async def test_connect_is_not_served(edge):
    answer = await edge.exchange(b"CONNECT 10.0.0.1:22 HTTP/1.1\r\nHost: 10.0.0.1:22\r\n\r\n")
    assert answer.status == 405


@pytest.mark.slow
async def test_slow_heads_are_not_waited_for(edge):
    """A byte now and then: after 30 s it is enough. An idle connection that had its answer may stay."""
    idle, slow, silent = await edge.raw(), await edge.raw(), await edge.raw()
    await idle.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await idle.answer()
    began = time.monotonic()

    async def trickle() -> None:
        await slow.send(b"GET / HTTP/1.1\r\nHost: h\r\n")
        while True:
            await slow.send(b"X: y\r\n")
            await asyncio.sleep(1)

    trickling = asyncio.create_task(trickle())
    await asyncio.gather(slow.end(), silent.end())
    assert 28 < time.monotonic() - began < 35
    trickling.cancel()
    await asyncio.wait([trickling])
    await idle.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    assert (await idle.answer()).status == 503
    for client in (idle, slow, silent):
        client.writer.close()


async def test_too_many_connections():
    async with running_edge("--max-connections", "3") as edge:
        clients = [await edge.raw() for _ in range(3)]
        for client in clients:
            await client.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            await client.answer()
        answer = await edge.exchange(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc")
        assert answer.status == 503
        assert json.loads(answer.body)["code"] == 503
        assert (answer.headers["retry-after"], answer.headers["should-retry"]) == ("1", "true")
        clients.pop().writer.close()
        await asyncio.sleep(0.1)
        response = await edge.client.get("/")
        assert "control plane" in response.json()["message"]
        for client in clients:
            client.writer.close()


async def test_logs_do_not_grow_with_the_attack(edge):
    for _ in range(300):
        await edge.client.get("/")
    assert len(edge.log.splitlines()) < 200


async def test_terminated_it_finishes_what_is_short_and_cuts_what_is_long(edge, sandbox):
    go_on = asyncio.Event()

    async def handler(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf")
        await (go_on.wait() if exchange.request.target == "/short" else asyncio.Event().wait())
        await exchange.send(b"half")

    sandbox.handler = handler
    short, long, idle = await edge.raw(), await edge.raw(), await edge.raw()
    await idle.send(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
    await idle.answer()
    for client, path in ((short, b"/short"), (long, b"/long")):
        await client.send(b"GET " + path + b" HTTP/1.1\r\n" + raw_to("iaaa", sandbox.port) + b"\r\n")
        await client.reader.readuntil(b"half")
    began = time.monotonic()
    edge.process.send_signal(signal.SIGHUP)
    await asyncio.sleep(0.2)
    edge.process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(idle.end(), 1)
    with pytest.raises(ConnectionError):
        await edge.raw()
    go_on.set()
    assert await short.reader.readexactly(4) == b"half"
    assert await long.end() == "reset"
    assert await edge.process.wait() == 0
    assert time.monotonic() - began < 4
    for client in (short, long, idle):
        client.writer.close()


async def test_a_shutdown_by_its_owner(edge):
    assert (await edge.admin.post("/shutdown")).status_code == 204
    assert await asyncio.wait_for(edge.process.wait(), 1) == 0
    assert not (edge.directory / "admin").exists()


@pytest.mark.parametrize(
    ("options", "code", "reason"),
    [
        (
            ["--listen", "{listen}", "--control", "c", "--admin", "{directory}/other"],
            1,
            "cannot listen on {listen}: Address",
        ),
        (
            ["--listen", "127.0.0.1:0", "--control", "c", "--admin", "{directory}/admin"],
            1,
            "another edge answers there",
        ),
        (["--listen", "127.0.0.1:0", "--control", "c"], 2, "--admin is missing"),
        (["--listen", "nowhere", "--control", "c", "--admin", "{directory}/other"], 1, "cannot listen on nowhere"),
    ],
)
async def test_it_says_why_it_does_not_start(edge, options, code, reason):
    names = {"listen": edge.listen, "directory": str(edge.directory)}
    process = await asyncio.create_subprocess_exec(
        edge_program(), *(option.format(**names) for option in options), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == code
    assert reason.format(**names) in errors.decode()
    assert (await edge.admin.get("/health")).status_code == 200
