"""A small internet for tests of network/: namespaces on this machine, and guests that are real Linux network
stacks.

    guest namespace ─ eth0 ═ (two tap queues, copied frame by frame) ═ tap0 ─ slot ─ host ═ veth ═ internet

The host is a namespace too, and the test's own: what a test counts there is the work of its pools alone. The
internet owns every address on INTERNET, those that no sandbox may reach included: what is refused there is
refused by a rule, not by a missing route.
"""

import asyncio
import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Self, TypeVar, cast

from aenv.network.slot import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, Slot

T = TypeVar("T")

HOST_PUBLIC = "203.0.113.1"
SITE = "203.0.113.2"
OTHER_SITE = "198.51.100.7"
CLASS_E = "250.1.2.3"
PRIVATE = "10.200.0.1"
METADATA = "169.254.169.254"
RESOLVER = "10.255.255.53"
INTERNET = (OTHER_SITE, CLASS_E, PRIVATE, METADATA, RESOLVER)

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETQUEUE = 0x400454D9
_TAP, _NO_PI, _MULTI_QUEUE, _ATTACH, _DETACH = 0x2, 0x1000, 0x100, 0x200, 0x400


class Namespace:
    """A network namespace held by a descriptor alone: it has no name and leaves nothing."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def new(cls) -> Self:
        def unshare() -> int:
            assert _libc.unshare(_CLONE_NEWNET) == 0
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

        return cls(in_thread(unshare))

    @classmethod
    def of_slot(cls, slot: Slot) -> Self:
        return cls(os.open(slot.netns, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        os.close(self.descriptor)

    def call(self, work: Callable[[], T]) -> T:
        def inside() -> T:
            assert _libc.setns(self.descriptor, _CLONE_NEWNET) == 0
            return work()

        return in_thread(inside)

    def run(self, *commands: str) -> str:
        def execute() -> str:
            outputs = []
            for command in commands:
                done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
                assert done.returncode == 0, f"{command}: {done.stderr}"
                outputs.append(done.stdout)
            return "".join(outputs)

        return self.call(execute)

    def socket(self, kind: socket.SocketKind) -> socket.socket:
        created = self.call(lambda: socket.socket(socket.AF_INET, kind))
        created.setblocking(False)
        return created


class Lab:
    """The host namespace, which the calling thread is in, and the internet beside it."""

    def __init__(self, host: Namespace, internet: Namespace) -> None:
        self.host = host
        self.internet = internet

    def leftovers(self) -> dict[str, list[str]]:
        """What pools leave on the host when they do not clean up."""
        links = self.host.run("ip -brief link").splitlines()
        return {
            "links": sorted(line.split()[0].split("@")[0] for line in links),
            "routes": sorted(self.host.run("ip -4 route show table all").splitlines()),
            "rules": self.host.run("nft list ruleset").splitlines(),
        }


@contextmanager
def lab() -> Iterator[Lab]:
    """Moves the calling thread, and every thread and child it starts, into the host namespace until the
    end."""
    with ExitStack() as undo:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, before)
        host, internet = Namespace.new(), Namespace.new()
        undo.callback(host.close)
        undo.callback(internet.close)
        assert _libc.setns(host.descriptor, _CLONE_NEWNET) == 0
        undo.callback(_libc.setns, before, _CLONE_NEWNET)
        host.run(
            f"ip link add world type veth peer name node netns /proc/{os.getpid()}/fd/{internet.descriptor}",
            f"ip address add {HOST_PUBLIC}/24 dev world",
            "ip link set world up",
            f"ip route add default via {SITE}",
        )
        internet.run(
            f"ip address add {SITE}/24 dev node",
            "ip link set node up",
            *(f"ip address add {address}/32 dev lo" for address in INTERNET),
        )
        yield Lab(host, internet)


class Guest:
    """A guest's network stack on a slot's tap, as a VM would have it."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.netns = Namespace.new()
        self._card = self.netns.call(lambda: _open_tap("eth0", 0))
        self.netns.run(
            f"ip link set eth0 address {GUEST_MAC} up",
            f"ip address add {GUEST_ADDRESS}/30 dev eth0",
            f"ip route add default via {GATEWAY_ADDRESS}",
        )
        self._queue = self._open_queue()
        self._cable = Cable(self._card, self._queue)

    def _open_queue(self) -> int:
        inside = Namespace.of_slot(self.slot)
        try:
            return inside.call(lambda: _open_tap("tap0", _MULTI_QUEUE))
        finally:
            inside.close()

    def succeed(self) -> None:
        """Go on with a queue of its own, as the successor of a VM does: opened beforehand, attached at the
        moment."""
        following = self._open_queue()
        _set_queue(following, _DETACH)
        self._cable.cut()
        _set_queue(self._queue, _DETACH)
        _set_queue(following, _ATTACH)
        os.close(self._queue)
        self._queue = following
        self._cable = Cable(self._card, self._queue)

    def inject(self, frame: bytes) -> None:
        """Send a raw Ethernet frame, whatever it claims."""
        os.write(self._queue, frame)

    def close(self) -> None:
        self._cable.cut()
        os.close(self._queue)
        os.close(self._card)
        self.netns.close()


class Cable:
    """Copies frames between two tap queues until cut."""

    def __init__(self, one: int, other: int) -> None:
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._copy, args=(one, other), name="cable")
        self._thread.start()

    def _copy(self, one: int, other: int) -> None:
        while True:
            ready, _, _ = select.select([one, other, self._stop], [], [])
            if self._stop in ready:
                return
            for source in ready:
                os.write(other if source == one else one, os.read(source, 65536))

    def cut(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        os.close(self._stop)


def _open_tap(name: str, flags: int) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PI | flags))
    return descriptor


def _set_queue(descriptor: int, flag: int) -> None:
    fcntl.ioctl(descriptor, _TUNSETQUEUE, struct.pack("16sH22x", b"", flag))


def in_thread(work: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


# conversations


async def serve(netns: Namespace, address: str, port: int) -> asyncio.Server:
    """An echo server on TCP."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
        except (OSError, asyncio.CancelledError):  # the peer was cut off, or the test is over
            pass
        finally:
            writer.close()

    listener = netns.socket(socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    return await asyncio.start_server(echo, sock=listener)


async def connect(netns: Namespace, address: str, port: int) -> socket.socket:
    """Raises: OSError when refused, TimeoutError when nothing answers."""
    client = netns.socket(socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(1.5):
            await asyncio.get_running_loop().sock_connect(client, (address, port))
    except BaseException:
        client.close()
        raise
    return client


async def exchange(client: socket.socket, message: bytes = b"ping") -> bytes:
    """Send and wait for the echo. Raises: OSError, TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(1.5):
        await loop.sock_sendall(client, message)
        return await loop.sock_recv(client, 4096)


async def talk(netns: Namespace, address: str, port: int) -> str:
    """`answered`, `refused` (at once, with an error) or `silent`."""
    try:
        client = await connect(netns, address, port)
    except TimeoutError:
        return "silent"
    except OSError:
        return "refused"
    with client:
        return "answered" if await exchange(client) == b"ping" else "garbled"


async def talk_udp(netns: Namespace, address: str, port: int, *, source: str = "") -> str:
    """As `talk`, one datagram; from `source` when given."""
    loop = asyncio.get_running_loop()
    with netns.socket(socket.SOCK_DGRAM) as client:
        if source:
            client.bind((source, 0))
        client.connect((address, port))
        try:
            return "answered" if await exchange(client) == b"ping" else "garbled"
        except TimeoutError:
            return "silent"
        except OSError:
            return "refused"
        finally:
            loop.remove_reader(client)


class UdpEcho(asyncio.DatagramProtocol):
    """Answers every datagram and remembers who sent it."""

    def __init__(self) -> None:
        self.senders: list[str] = []
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.senders.append(addr[0])
        assert self._transport is not None
        self._transport.sendto(data, addr)


async def serve_udp(netns: Namespace, address: str, port: int) -> tuple[asyncio.DatagramTransport, UdpEcho]:
    server = netns.socket(socket.SOCK_DGRAM)
    server.bind((address, port))
    return await asyncio.get_running_loop().create_datagram_endpoint(UdpEcho, sock=server)
