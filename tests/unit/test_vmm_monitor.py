"""The QMP session, against a QEMU that says what a test wants."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from aenv.vmm.qemu.monitor import Monitor, MonitorLostError

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}, "capabilities": ["oob"]}}
LOADED = {"event": "MIGRATION", "data": {"status": "completed"}, "timestamp": {"seconds": 1, "microseconds": 0}}


class Qemu:
    """The other end of a monitor."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\r\n")

    async def asked(self) -> dict[str, Any]:
        """One command; the client ends none by a line's end."""
        text = b""
        while True:
            text += await self.reader.read(1)
            with suppress(ValueError):
                return json.loads(text)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[socket.socket, Qemu]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    qemu = Qemu(*await asyncio.open_unix_connection(sock=theirs))
    yield ours, qemu
    qemu.writer.close()


async def test_an_event_before_the_answer_is_no_failure(ends):
    ours, qemu = ends
    connecting = asyncio.create_task(Monitor.connect(ours))
    qemu.say(GREETING)
    asked = await qemu.asked()
    assert asked["execute"] == "qmp_capabilities"
    qemu.say(LOADED)
    qemu.say({"return": {}, "id": asked["id"]})
    monitor = await connecting
    loading = asyncio.create_task(monitor.loaded())
    for status in ("active", "completed"):
        qemu.say({"return": {"status": status}, "id": (await qemu.asked())["id"]})
    await loading
    await monitor.close()


@pytest.mark.parametrize("answers", [0, 1])
async def test_one_that_hangs_up_is_lost(ends, answers):
    ours, qemu = ends
    connecting = asyncio.create_task(Monitor.connect(ours))
    if answers:
        qemu.say(GREETING)
        await qemu.asked()
    qemu.writer.close()
    with pytest.raises(MonitorLostError):
        await connecting


async def test_one_that_refuses_is_lost(ends):
    ours, qemu = ends
    connecting = asyncio.create_task(Monitor.connect(ours))
    qemu.say(GREETING)
    asked = await qemu.asked()
    qemu.say({"error": {"class": "GenericError", "desc": "told to refuse"}, "id": asked["id"]})
    with pytest.raises(MonitorLostError, match="told to refuse"):
        await connecting
