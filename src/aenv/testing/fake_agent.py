"""The guest agent of a fake VM: the calls that a node makes on it (docs/protocols/envd.md), on a real socket.

It is reached only while a guest runs on its network, and what it remembers is part of the guest's memory: a capture
taken while user processes are frozen restores to frozen ones.
"""

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from typing import Any

from aenv.guest.client import ENVD_PORT
from aenv.testing.fake_vmm import Failure, FakeGuest, FakeHost
from aenv.vmm.contract import NetworkAttachment

_FRAME_HEAD = struct.Struct(">BI")
_END_OF_STREAM = 0x02
Answer = tuple[int, bytes]
_NONE: Answer = 0, b""


class FakeAgent:
    """Serves one address. `FakeHost.fail` makes its next `POST /init`, `POST /freeze` … go wrong too: REFUSE answers
    500, DIE breaks the connection off, HANG never answers.
    """

    def __init__(self, host: FakeHost, network: NetworkAttachment) -> None:
        self._host = host
        self._network = network
        self._server: asyncio.Server | None = None
        self.unfreezable = False
        """Tasks of this guest do not freeze."""

    async def start(self, address: str) -> None:
        self._server = await asyncio.start_server(self._serve, address, ENVD_PORT)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
            body = await reader.readexactly(length)
            answer = self._answer(f"{method} {path}", body)
            if answer is None:
                await reader.read()  # until the node gives up
            elif answer != _NONE:
                status, content = answer
                writer.write(f"HTTP/1.0 {status} -\r\n\r\n".encode() + content)
                await writer.drain()
        except (OSError, EOFError):
            pass  # the node gave up
        finally:
            writer.close()

    def _answer(self, request: str, body: bytes) -> Answer | None:
        """None: never."""
        guest = self._host.guest_on(self._network)
        match self._host.take_failure(request) if guest is not None else Failure.HANG:
            case Failure.REFUSE:
                return 500, b'{"message": "told to fail"}'
            case Failure.DIE:
                return _NONE
            case Failure.HANG:
                return None
        assert guest is not None
        return self._calls[request](self, guest, body)

    def _health(self, guest: FakeGuest, body: bytes) -> Answer:
        return 204, b""

    def _init(self, guest: FakeGuest, body: bytes) -> Answer:
        fields = json.loads(body)
        thaw = fields.pop("thaw", False)
        guest.agent.update(fields)
        if thaw:
            guest.agent["frozen"] = False
        return 204, b""

    def _freeze(self, guest: FakeGuest, body: bytes) -> Answer:
        guest.agent["frozen"] = not self.unfreezable
        return 200, json.dumps({"frozen": not self.unfreezable, "reason": "told so" * self.unfreezable}).encode()

    def _unfreeze(self, guest: FakeGuest, body: bytes) -> Answer:
        guest.agent["frozen"] = False
        return 204, b""

    def _run(self, guest: FakeGuest, body: bytes) -> Answer:
        """Every command succeeds and says `ok`."""
        said: dict[str, Any] = {"event": {"data": {"stdout": base64.b64encode(b"ok\n").decode()}}}
        frames = [(0, said), (0, {"event": {"end": {"exitCode": 0}}}), (_END_OF_STREAM, {})]
        content = b""
        for flags, message in frames:
            data = json.dumps(message).encode()
            content += _FRAME_HEAD.pack(flags, len(data)) + data
        return 200, content

    _calls: dict[str, Callable[["FakeAgent", FakeGuest, bytes], Answer]] = {  # noqa: RUF012
        "GET /health": _health,
        "POST /init": _init,
        "POST /freeze": _freeze,
        "POST /unfreeze": _unfreeze,
        "POST /process.Process/Start": _run,
    }
