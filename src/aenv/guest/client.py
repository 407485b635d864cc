"""The node's calls to the agent in one guest (docs/protocols/envd.md), and the little of E2B's protocol that it needs.

A request is a connection of its own: a restored guest can hold none from before, and connecting costs one round trip on
a local link. HTTP/1.0 is spoken, so a response ends with its connection and there is no framing to undo. No request is
repeated, except by `wait_healthy`.
"""

import asyncio
import base64
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from aenv.errors import GuestUnresponsive, OperationFailed

ENVD_PORT = 49983
CONTROL_TIMEOUT_S = 10.0
"""Deadline of a call that names none: the agent answers them at once, but an emulated guest may be slow."""

_FIRST_ATTEMPT_S = 0.25
_LONGEST_ATTEMPT_S = 4.0
"""A SYN lost on a guest without network is sent again by the kernel after 1 s; starting over is quicker. Each attempt
gets twice the time of the one before, for a guest that is there but slow."""
_REFUSED_PAUSE_S = 0.005
"""The guest's kernel answers but its agent does not listen yet."""
_ANSWER_S = 5.0
"""What a guest that keeps a deadline of its own may take to say so."""
_END_OF_STREAM = 0x02
_FRAME_HEAD = struct.Struct(">BI")


@dataclass(frozen=True)
class InitRequest:
    """What to tell the agent; None leaves things as they are. Fields are those of `POST /init`."""

    access_token: str | None = None
    env_vars: Mapping[str, str] | None = None
    timestamp: datetime | None = None
    entropy: bytes | None = None
    hostname: str | None = None
    machine_id: str | None = None
    dns_servers: list[str] | None = None
    default_user: str | None = None
    default_workdir: str | None = None
    sandbox_id: str | None = None
    template_id: str | None = None
    lifecycle_id: str | None = None
    thaw: bool = False

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "accessToken": self.access_token,
            "envVars": None if self.env_vars is None else dict(self.env_vars),
            "timestamp": None if self.timestamp is None else self.timestamp.isoformat(),
            "entropy": None if self.entropy is None else base64.b64encode(self.entropy).decode(),
            "hostname": self.hostname,
            "machineId": self.machine_id,
            "dnsServers": self.dns_servers,
            "defaultUser": self.default_user,
            "defaultWorkdir": self.default_workdir,
            "sandboxId": self.sandbox_id,
            "templateId": self.template_id,
            "lifecycleID": self.lifecycle_id,
            "thaw": self.thaw or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class FreezeResult:
    frozen: bool
    """Whether every user process is stopped; if not, all of them run."""
    reason: str
    """Why not, or what else was not as it should be; "" when all is well."""


@dataclass(frozen=True)
class GuestMetrics:
    """Sizes in bytes."""

    cpu_count: int
    cpu_used_pct: float
    mem_total: int
    mem_used: int
    mem_cache: int
    disk_total: int
    disk_used: int


@dataclass(frozen=True)
class ExitResult:
    exit_code: int
    """-1 when a signal ended the command."""
    stdout: bytes
    stderr: bytes
    error: str
    """"" for exit code 0, else as the agent puts it: `exit status 3`, `signal: killed`."""


@dataclass(frozen=True)
class _Response:
    status: int
    body: asyncio.StreamReader


class EnvdClient:
    """Calls to the agent at `address`. Holds no connection, so it needs no closing.

    Every call raises GuestUnresponsive when the agent cannot be reached, breaks off, or takes longer than its deadline,
    and OperationFailed when it answers that the call failed; what the guest had done until then is done.
    """

    def __init__(self, address: str, port: int = ENVD_PORT, token: str | None = None) -> None:
        self._address = address
        self._port = port
        self._token = token or None

    async def wait_healthy(self, deadline_s: float) -> None:
        """Return as soon as the agent serves.

        The agent listens before it makes the network work, so what ends the wait is the guest's own first packet. An
        attempt that is refused, because nothing listens yet, is repeated at once.
        """
        last: Exception | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        async with self._exchange("GET", "/health", b"", {}) as response:
                            await _checked(response, "GET /health")
                            return
                    except (OSError, EOFError, ValueError) as error:
                        last = error
                        await asyncio.sleep(_REFUSED_PAUSE_S)
        except TimeoutError:
            raise GuestUnresponsive(
                f"the guest agent at {self._address} did not answer within {deadline_s:g} s"
            ) from last

    async def init(self, request: InitRequest, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Apply `request`. The token in it, if any, is the one that this client presents from then on."""
        await self._call("POST", "/init", request.to_json(), timeout_s)
        if request.access_token is not None:
            self._token = request.access_token or None

    async def freeze(self, timeout_s: float) -> FreezeResult:
        """Stop all user processes, within `timeout_s`; a guest under load may take some seconds longer to answer."""
        body = {"timeoutMs": round(timeout_s * 1000)}
        answer = await self._call("POST", "/freeze", body, timeout_s + _ANSWER_S)
        return FreezeResult(frozen=bool(answer["frozen"]), reason=str(answer.get("reason", "")))

    async def unfreeze(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Let user processes go on. Idempotent."""
        await self._call("POST", "/unfreeze", {}, timeout_s)

    async def metrics(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> GuestMetrics:
        answer = await self._call("GET", "/metrics", None, timeout_s)
        return GuestMetrics(**{name: answer[name] for name in GuestMetrics.__dataclass_fields__})

    async def run(self, cmd: str, user: str, *, timeout_s: float = 60.0) -> ExitResult:
        """Run `cmd` with the image's /bin/sh and collect its output, which is held in memory.

        At `timeout_s` the command and its process group are killed, and GuestUnresponsive is raised.
        """
        config = {"cmd": "/bin/sh", "args": ["-c", cmd]}
        message = json.dumps({"process": config, "stdin": False}).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(round(timeout_s * 1000)),
            "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
        }
        body = _FRAME_HEAD.pack(0, len(message)) + message
        collected: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        end: dict[str, Any] | None = None
        async with self._answer("POST", "/process.Process/Start", body, headers, timeout_s + _ANSWER_S) as response:
            async for received in _messages(response):
                event = received.get("event", {})
                for stream, data in event.get("data", {}).items():
                    collected[stream] += base64.b64decode(data)
                end = event.get("end", end)
        if end is None:
            raise GuestUnresponsive(f"the guest agent at {self._address} did not say how the command ended")
        return ExitResult(
            exit_code=int(end.get("exitCode", 0)),
            stdout=bytes(collected["stdout"]),
            stderr=bytes(collected["stderr"]),
            error=str(end.get("error", "")),
        )

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """One call with JSON both ways; {} for an empty answer."""
        data = b"" if body is None else json.dumps(body).encode()
        async with self._answer(method, path, data, {"Content-Type": "application/json"}, timeout_s) as response:
            content = await response.body.read()
            answer = json.loads(content) if content else {}
            if not isinstance(answer, dict):
                raise ValueError(f"not an object: {content[:100]!r}")
            return answer

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> AsyncIterator[_Response]:
        """An exchange with a successful response, in the terms of this package's errors."""
        call = f"{method} {path}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._exchange(method, path, body, headers) as response,
            ):
                await _checked(response, call)
                yield response
        except TimeoutError as error:
            raise GuestUnresponsive(
                f"{call}: the guest agent at {self._address} did not answer within {timeout_s:g} s"
            ) from error
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise GuestUnresponsive(f"{call}: no answer from the guest agent at {self._address}: {error}") from error

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> AsyncIterator[_Response]:
        """Send a request and read the head of its response. Raises: OSError, EOFError, ValueError."""
        reader, writer = await self._connect()
        try:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = [f"{method} {path} HTTP/1.0", f"Host: {self._address}", f"Content-Length: {len(body)}"]
            if self._token is not None:
                lines.append(f"X-Access-Token: {self._token}")
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            head = await reader.readuntil(b"\r\n\r\n")
            yield _Response(status=int(head.split(b" ", 2)[1]), body=reader)
        except asyncio.LimitOverrunError as error:
            raise ValueError(f"not a response head: {error}") from error
        except IndexError as error:
            raise ValueError("not a response head") from error
        finally:
            # The exchange is over, whatever may still be under way.
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        attempt_s = _FIRST_ATTEMPT_S
        while True:
            try:
                async with asyncio.timeout(attempt_s):
                    return await asyncio.open_connection(self._address, self._port)
            except TimeoutError:
                attempt_s = min(2 * attempt_s, _LONGEST_ATTEMPT_S)


async def _checked(response: _Response, call: str) -> None:
    """Raises: OperationFailed with what the agent says, unless the response is a success."""
    if 200 <= response.status < 300:
        return
    content = await response.body.read(64 << 10)
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    raise OperationFailed(f"{call}: the guest agent answered {response.status}: {message}")


async def _messages(response: _Response) -> AsyncIterator[dict[str, Any]]:
    """Messages of a Connect stream. Raises: OperationFailed when it ends with an error, EOFError when it breaks off."""
    while True:
        flags, length = _FRAME_HEAD.unpack(await response.body.readexactly(_FRAME_HEAD.size))
        message = json.loads(await response.body.readexactly(length))
        if not flags & _END_OF_STREAM:
            yield message
            continue
        if error := message.get("error"):
            text = f"the guest agent: {error.get('code')}: {error.get('message', '')}"
            if error.get("code") == "deadline_exceeded":
                raise GuestUnresponsive(text)
            raise OperationFailed(text)
        return
