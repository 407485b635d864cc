"""A network namespace with a tap for one test VM, and requests to the test guest in it. Needs root."""

import asyncio
import contextlib
import secrets
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from aenv.vmm.contract import NetworkAttachment
from aenv.vmm.process import in_network_namespace

GUEST = "169.254.0.21"
_TAP = "tap0"
_COMMAND_PORT = 7


class GuestLink:
    """The host's end of the link to one guest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.netns = Path("/run/netns", name)
        self.attachment = NetworkAttachment(self.netns, _TAP, "02:00:00:00:00:01")

    def socket(self) -> socket.socket:
        """A non-blocking UDP socket connected to the guest's command port."""

        def connect() -> socket.socket:
            opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            opened.connect((GUEST, _COMMAND_PORT))
            return opened

        return in_network_namespace(self.netns, connect)

    async def ask(self, request: str, *, timeout_s: float = 60.0, repeat_s: float = 0.5) -> str:
        """The guest's answer; asked again until it comes, since a guest that still boots hears nothing.
        Raises: TimeoutError.
        """
        loop = asyncio.get_running_loop()
        with self.socket() as link:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(OSError):
                        await loop.sock_sendall(link, request.encode())
                    with contextlib.suppress(TimeoutError, ConnectionError):
                        return (await asyncio.wait_for(loop.sock_recv(link, 100), repeat_s)).decode()

    async def count_lost(self, stop: asyncio.Event) -> int:
        """Ask every 5 ms until `stop`, each question once; how many were not answered within 2 s of the last."""
        loop = asyncio.get_running_loop()
        asked = answered = 0
        all_answered = asyncio.Event()
        with self.socket() as link:

            def receive() -> None:
                nonlocal answered
                link.recv(100)
                answered += 1
                if answered == asked:
                    all_answered.set()

            loop.add_reader(link, receive)
            try:
                while not stop.is_set():
                    link.send(b"count")
                    asked += 1
                    all_answered.clear()
                    await asyncio.sleep(0.005)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(all_answered.wait(), 2.0)
            finally:
                loop.remove_reader(link)
        return asked - answered


@contextlib.contextmanager
def network() -> Iterator[GuestLink]:
    """A namespace of our own, removed at the end with all in it."""
    link = GuestLink(f"aenvtest-{secrets.token_hex(3)}")
    _run("ip", "netns", "add", link.name)
    try:
        _in(link, "ip", "tuntap", "add", _TAP, "mode", "tap", "multi_queue", "vnet_hdr")
        _in(link, "ip", "address", "add", "169.254.0.22/30", "dev", _TAP)
        _in(link, "ip", "link", "set", _TAP, "up")
        yield link
    finally:
        _run("ip", "netns", "delete", link.name)


def _in(link: GuestLink, *command: str) -> None:
    _run("ip", "netns", "exec", link.name, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
