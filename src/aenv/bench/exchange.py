"""HTTP requests as an SDK makes them, at next to no cost of the client's: one blocking exchange on a connection of its
own. The same code asks a node's front door and a bare guest, so what it costs is on both sides.
"""

import base64
import json
import socket
import struct
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any

from aenv.errors import OperationFailed

TIMEOUT_S = 120.0
_FRAME_HEAD = struct.Struct(">BI")
_END_OF_STREAM = 0x02

Connect = Callable[[], socket.socket]
"""Opens a connection to whom the requests are for."""


def exchange(
    connect: Connect, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> tuple[int, bytes]:
    """One request on a new connection: status and body of the answer. Raises: OperationFailed when none comes."""
    try:
        with connect() as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(TIMEOUT_S)
            connection = HTTPConnection("sandbox")
            connection.sock = link
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read()
    except (OSError, HTTPException) as error:
        raise OperationFailed(f"{method} {path}: no answer: {error!r}") from error


def call(connect: Connect, method: str, path: str, headers: Mapping[str, str], body: object = None) -> Any:
    """An exchange in JSON; None for an empty answer. Raises: OperationFailed unless it succeeds."""
    content = b"" if body is None else json.dumps(body).encode()
    status, answer = exchange(connect, method, path, {"Content-Type": "application/json", **headers}, content)
    if status >= 300:
        raise OperationFailed(f"{method} {path}: status {status}: {answer[:500].decode(errors='replace')}")
    return json.loads(answer) if answer else None


def run(connect: Connect, command: str, headers: Mapping[str, str]) -> bytes:
    """Run `command` as SDKs do: by a login shell of the user `user`. Returns its standard output.

    Raises: OperationFailed when it does not end with exit code 0.
    """
    config = {"cmd": "/bin/bash", "args": ["-l", "-c", command], "envs": {}}
    message = json.dumps({"process": config, "stdin": False}).encode()
    stream = {
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
        "Authorization": "Basic " + base64.b64encode(b"user:").decode(),
        **headers,
    }
    path = "/process.Process/Start"
    status, answer = exchange(connect, "POST", path, stream, _FRAME_HEAD.pack(0, len(message)) + message)
    if status != 200:
        raise OperationFailed(f"POST {path}: status {status}: {answer[:500].decode(errors='replace')}")
    output, ended = b"", False
    for event in _events(answer):
        output += base64.b64decode(event.get("data", {}).get("stdout", ""))
        if (end := event.get("end")) is not None:
            ended = end.get("exitCode", 0) == 0 and end.get("exited", True)
    if not ended:
        raise OperationFailed(f"`{command}` did not end well: {answer[-500:]!r}")
    return output


def _events(stream: bytes) -> list[dict[str, Any]]:
    found, offset = [], 0
    while offset + _FRAME_HEAD.size <= len(stream):
        flags, length = _FRAME_HEAD.unpack_from(stream, offset)
        offset += _FRAME_HEAD.size
        if not flags & _END_OF_STREAM:
            found.append(json.loads(stream[offset : offset + length]).get("event", {}))
        offset += length
    return found
