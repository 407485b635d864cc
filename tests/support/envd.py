"""envd as an ordinary program on loopback, and its callers: the E2B SDK, and raw Connect requests.

It runs in a mount namespace of its own with an empty /home, so that the homes it makes vanish with it.
"""

import asyncio
import base64
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from e2b import AsyncSandbox

from aenv.guest.client import EnvdClient
from aenv_native import program

_ISOLATED = 'mount -t tmpfs none /home && exec "$0" "$@"'


def envd_program() -> Path:
    override = os.environ.get("AENV_ENVD")
    return Path(override) if override else program("envd")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Envd:
    port: int
    process: asyncio.subprocess.Process
    http: httpx.AsyncClient = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, token: str | None = None) -> EnvdClient:
        return EnvdClient("127.0.0.1", self.port, token)

    async def sandbox(self) -> AsyncSandbox:
        """The SDK, believing that this is its sandbox."""
        return await AsyncSandbox.create(debug=True, sandbox_url=self.url, api_key="e2b_" + "0" * 40)

    async def unary(self, method: str, body: Any, user: str | None = "root", **headers: str) -> httpx.Response:
        """`method` is `package.Service/Method`; a body that is not bytes is sent as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **as_user(user), **headers}
        return await self.http.post(f"/{method}", content=content, headers=sent)

    async def stream(self, method: str, message: Any, user: str | None = "root", **headers: str) -> list[Any]:
        """All messages of a server stream, the end-of-stream one last."""
        return [message async for message in self.messages(method, frame(message), user, **headers)]

    async def messages(self, method: str, body: bytes, user: str | None = "root", **headers: str) -> AsyncIterator[Any]:
        sent = {"content-type": "application/connect+json", **as_user(user), **headers}
        async with self.http.stream("POST", f"/{method}", content=body, headers=sent, timeout=60) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"] == "application/connect+json"
            buffered = b""
            async for piece in response.aiter_raw():
                buffered += piece
                for flags, message, rest in unframed(buffered):
                    buffered = rest
                    yield message
                    if flags & 2:
                        return

    async def raw(self, request: bytes, *, timeout_s: float = 10) -> bytes:
        """What it answers to these bytes until it closes the connection, or is silent for a second."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        received = b""
        with suppress(TimeoutError, ConnectionError):
            writer.write(request)
            async with asyncio.timeout(timeout_s):
                while piece := await asyncio.wait_for(reader.read(1 << 16), 1):
                    received += piece
        writer.transport.abort()
        return received

    def resident_kib(self) -> int:
        (envd,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        status = Path(f"/proc/{envd}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def as_user(user: str | None) -> dict[str, str]:
    return {} if user is None else {"authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


def frame(message: Any, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def unframed(data: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Flags, message and what follows it, for each whole frame."""
    while len(data) >= 5:
        flags, length = struct.unpack_from(">BI", data)
        if len(data) < 5 + length:
            return
        message, data = json.loads(data[5 : 5 + length]), data[5 + length :]
        yield flags, message, data


@asynccontextmanager
async def running_envd(*arguments: str, control: bool = True) -> AsyncIterator[Envd]:
    """envd, serving; ended with all that it started when the block is left."""
    port = free_port()
    command = [str(envd_program()), "--listen", f"127.0.0.1:{port}", *arguments]
    if control:
        command.append("--allow-local-control")
    process = await asyncio.create_subprocess_exec(
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        _ISOLATED,
        *command,
        "--no-init",
    )
    try:
        await EnvdClient("127.0.0.1", port).wait_healthy(10)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            yield Envd(port, process, http)
    finally:
        process.kill()
        await process.wait()
