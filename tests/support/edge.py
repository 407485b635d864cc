"""edge as a process of its own, with scripted servers as its sandboxes and its control plane, all on loopback."""

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from aenv_native import program

CHUNKED_END = b"0\r\n\r\n"


@dataclass
class Request:
    """As a server got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    connection: int = 0
    """Which of the server's connections it came on, from 1."""

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name.lower()]
        assert len(values) < 2, (name, values)
        return values[0] if values else None


class Exchange:
    """A request whose body may not have been read, and the connection to answer on."""

    def __init__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self.reader = reader
        self.writer = writer

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces of the body, as they come."""
        if self.request.header("transfer-encoding") == "chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass
        left = int(self.request.header("content-length") or 0)
        while left > 0:
            piece = await self.reader.read(min(left, 1 << 18))
            if not piece:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece

    async def read_body(self) -> bytes:
        self.request.body = b"".join([piece async for piece in self.body()])
        return self.request.body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes, status: str = "200 OK", headers: str = "") -> None:
        await self.send(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body)

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")


Handler = Callable[[Exchange], Awaitable[None]]


class Server:
    """An HTTP/1.1 server that does what its handler says, and remembers what it was asked."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.handler: Handler = self.echo
        self.requests: list[Request] = []
        self.asked = asyncio.Event()
        """Set once there is a request."""
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def echo(self, exchange: Exchange) -> None:
        """The request as JSON."""
        body = await exchange.read_body()
        request = exchange.request
        told = {
            "server": self.name,
            "method": request.method,
            "target": request.target,
            "headers": request.headers,
            "body": body.decode("latin1"),
        }
        await exchange.answer(json.dumps(told).encode(), headers="content-type: application/json\r\n")

    async def listen(self, address: str, port: int = 0) -> "Server":
        self._server = await asyncio.start_server(self._serve, address, port, limit=1 << 18)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def listen_unix(self, path: Path) -> "Server":
        self._server = await asyncio.start_unix_server(self._serve, path, limit=1 << 18)
        return self

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Drop every connection."""
        for writer in list(self.open):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        self.open.add(writer)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    request = parse_head(await reader.readuntil(b"\r\n\r\n"))
                    request.connection = number
                    self.requests.append(request)
                    self.asked.set()
                    await self.handler(Exchange(request, reader, writer))
        finally:
            self.open.discard(writer)
            writer.close()


def parse_head(head: bytes) -> Request:
    first, *lines = head.decode("latin1").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    pairs = [line.split(":", 1) for line in lines]
    return Request(method, target, [(name.lower(), value.strip()) for name, value in pairs])


@dataclass
class Answer:
    """What a raw client read."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class RawClient:
    """Exactly these bytes, and what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin1").rstrip("\r\n").split("\r\n")
        pairs = [line.split(":", 1) for line in lines]
        return Answer(int(first.split(" ")[1]), {name.lower(): value.strip() for name, value in pairs})

    async def answer(self) -> Answer:
        """Head and body of an answer with a length."""
        answer = await self.head()
        answer.body = await self.reader.readexactly(int(answer.headers.get("content-length", 0)))
        return answer

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def end(self) -> str:
        """How the connection ends: "reset" or "closed", whatever comes before."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            return "reset"
        return "closed"


class Edge:
    """A running edge. Its sockets and its log are in `directory`."""

    def __init__(self, directory: Path, process: asyncio.subprocess.Process, listen: str) -> None:
        self.directory = directory
        self.process = process
        self.listen = listen
        self.url = f"http://{listen}"
        transport = httpx.AsyncHTTPTransport(uds=str(directory / "admin"))
        self.admin = httpx.AsyncClient(transport=transport, base_url="http://edge")
        self.client = httpx.AsyncClient(base_url=self.url)
        self._raw: list[RawClient] = []

    @property
    def control_socket(self) -> Path:
        return self.directory / "control"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    async def route(self, sandbox_id: str, address: str | None, generation: int = 1, **other: Any) -> httpx.Response:
        fields = {"state": "running", "envd_port": 49983, "access_token": None, "traffic_token": None}
        body = {"generation": generation, "address": address, **fields, **other}
        return await self.admin.put(f"/routes/{sandbox_id}", json=body)

    async def unroute(self, sandbox_id: str, generation: int = 1) -> httpx.Response:
        return await self.admin.delete(f"/routes/{sandbox_id}", params={"generation": generation})

    async def metric(self, name: str) -> int:
        for line in (await self.admin.get("/metrics")).text.splitlines():
            if line.startswith(f"aenv_edge_{name} "):
                return int(line.split()[1])
        raise LookupError(name)

    async def raw(self) -> RawClient:
        host, port = self.listen.rsplit(":", 1)
        self._raw.append(RawClient(*await asyncio.open_connection(host, int(port))))
        return self._raw[-1]

    async def close(self) -> None:
        """Let go of all connections to it."""
        for client in self._raw:
            if not client.writer.is_closing():
                client.writer.transport.abort()
        await self.admin.aclose()
        await self.client.aclose()

    async def exchange(self, data: bytes) -> Answer:
        """One raw request, one answer."""
        client = await self.raw()
        await client.send(data)
        return await client.answer()

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024


def to(sandbox_id: str, port: int) -> dict[str, str]:
    """The headers that route a request."""
    return {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(port)}


def raw_to(sandbox_id: str, port: int) -> bytes:
    return f"Host: h\r\nE2b-Sandbox-Id: {sandbox_id}\r\nE2b-Sandbox-Port: {port}\r\n".encode()


def edge_program() -> str:
    return os.environ.get("AENV_EDGE") or str(program("edge"))


@asynccontextmanager
async def running_edge(*options: str) -> AsyncIterator[Edge]:
    with tempfile.TemporaryDirectory(prefix="edge-", dir="/tmp") as name:
        directory = Path(name)
        process = await asyncio.create_subprocess_exec(
            edge_program(),
            *("--listen", "127.0.0.1:0", "--control", str(directory / "control")),
            *("--admin", str(directory / "admin"), "--log", str(directory / "log"), *options),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 10)).decode()
            edge = Edge(directory, process, line.removeprefix("ready ").strip())
            try:
                yield edge
            finally:
                await edge.close()
            assert "panicked" not in edge.log, edge.log
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
