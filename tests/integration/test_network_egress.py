"""What a guest reaches and what reaches it, in real namespaces and against real rules."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.network_lab import (
    CLASS_E,
    HOST_PUBLIC,
    METADATA,
    OTHER_SITE,
    PRIVATE,
    RESOLVER,
    SITE,
    Guest,
    Lab,
    Namespace,
    UdpEcho,
    connect,
    exchange,
    lab,
    serve,
    serve_udp,
    talk,
    talk_udp,
)

from aenv.clock import SystemClock
from aenv.errors import InvalidRequest, NotFound
from aenv.ids import new_instance_id
from aenv.ledger import Ledger
from aenv.network import ruleset
from aenv.network.policy import NetworkPolicy
from aenv.network.pool import SlotPool
from aenv.network.slot import GATEWAY_ADDRESS
from aenv.settings import Settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

PORT = 8080
EVERYTHING = "0.0.0.0/0"
OPEN = NetworkPolicy()


class Net:
    """A pool, the world around it, and guests on its slots."""

    def __init__(self, world: Lab, pool: SlotPool, undo: AsyncExitStack) -> None:
        self.world = world
        self.pool = pool
        self._undo = undo

    async def guest(self, policy: NetworkPolicy = OPEN) -> Guest:
        slot = await self.pool.acquire("test", policy)
        self._undo.callback(self.pool.release, slot)
        guest = Guest(slot)
        self._undo.callback(guest.close)
        return guest

    async def serve(self, netns: Namespace, address: str, port: int = PORT) -> None:
        server = await serve(netns, address, port)
        self._undo.callback(server.close)

    async def serve_udp(self, address: str, port: int) -> tuple[asyncio.DatagramTransport, UdpEcho]:
        transport, echo = await serve_udp(self.world.internet, address, port)
        self._undo.callback(transport.close)
        return transport, echo


def admit_everyone(guest: Guest) -> None:
    """Break the slot's own protection of its guest."""
    inside = Namespace.of_slot(guest.slot)
    inside.run("nft flush chain inet aenv to_guest", "nft add rule inet aenv to_guest accept")
    inside.close()


@pytest.fixture
def world() -> Iterator[Lab]:
    with lab() as world:
        yield world


@pytest_asyncio.fixture
async def net(world: Lab, tmp_path: Path) -> AsyncIterator[Net]:
    settings = Settings(slot_pool_size=0, dns_servers=[RESOLVER])
    pool = SlotPool(settings, new_instance_id(), Ledger(tmp_path), SystemClock())
    async with AsyncExitStack() as undo:
        undo.push_async_callback(pool.close)
        await pool.start()
        net = Net(world, pool, undo)
        await net.serve(world.internet, "0.0.0.0")
        yield net


async def test_the_host_reaches_the_guest(net: Net) -> None:
    guest = await net.guest()
    await net.serve(guest.netns, "0.0.0.0")
    assert await talk(net.world.host, guest.slot.host_address, PORT) == "answered"
    assert await talk(net.world.host, guest.slot.host_address, PORT + 1) == "refused"


@pytest.mark.parametrize("gone", ["nothing", "the slot's rules", "the host's rules"])
async def test_nobody_but_the_host_reaches_the_guest(net: Net, gone: str) -> None:
    guest = await net.guest()
    await net.serve(guest.netns, "0.0.0.0")
    net.world.internet.run(f"ip route add {guest.slot.host_address} via {HOST_PUBLIC}")
    if gone == "the slot's rules":
        admit_everyone(guest)
    if gone == "the host's rules":
        net.world.host.run(f"nft delete table inet {net.pool.plan.table}")
    assert await talk(net.world.internet, guest.slot.host_address, PORT) == "silent"
    assert await talk(net.world.host, guest.slot.host_address, PORT) == "answered"


async def test_the_guest_reaches_the_internet_under_the_hosts_address(net: Net) -> None:
    guest = await net.guest()
    for address in (SITE, OTHER_SITE, CLASS_E):
        assert await talk(guest.netns, address, PORT) == "answered"
    _, echo = await net.serve_udp(SITE, 9000)
    assert await talk_udp(guest.netns, SITE, 9000) == "answered"
    assert echo.senders == [HOST_PUBLIC]


async def test_private_ranges_and_metadata_are_refused_whatever_the_policy(net: Net) -> None:
    everything = (EVERYTHING, f"{PRIVATE}/32", f"{METADATA}/32", "10.0.0.0/8")
    for policy in (OPEN, NetworkPolicy(allow_out=everything)):
        guest = await net.guest(policy)
        for address in (PRIVATE, METADATA):
            assert await talk(net.world.host, address, PORT) == "answered"
            assert await talk(guest.netns, address, PORT) == "refused"


async def test_the_guest_reaches_nothing_of_the_host(net: Net) -> None:
    guest = await net.guest(NetworkPolicy(allow_out=(EVERYTHING,)))
    await net.serve(net.world.host, "0.0.0.0")
    assert await talk(net.world.internet, HOST_PUBLIC, PORT) == "answered"
    plan, index = net.pool.plan, guest.slot.index
    inside = Namespace.of_slot(guest.slot)
    await net.serve(inside, "0.0.0.0")
    inside.close()
    targets = (
        HOST_PUBLIC,
        plan.host_end(index),
        plan.slot_end(index),
        GATEWAY_ADDRESS,
        guest.slot.host_address,
        "169.254.0.23",
    )
    outcomes = {address: await talk(guest.netns, address, PORT) for address in targets}
    assert "answered" not in outcomes.values(), outcomes


async def test_the_guest_reaches_no_other_sandbox(net: Net) -> None:
    one, other = await net.guest(NetworkPolicy(allow_out=(EVERYTHING, "10.0.0.0/8"))), await net.guest()
    await net.serve(other.netns, "0.0.0.0")
    assert await talk(net.world.host, other.slot.host_address, PORT) == "answered"
    assert await talk(one.netns, other.slot.host_address, PORT) == "refused"
    assert await talk(one.netns, net.pool.plan.slot_end(other.slot.index), PORT) == "refused"


async def test_the_host_holds_when_a_slots_own_rules_are_gone(net: Net) -> None:
    one, other = await net.guest(), await net.guest()
    await net.serve(other.netns, "0.0.0.0")
    await net.serve(net.world.host, "0.0.0.0")
    _, echo = await net.serve_udp(SITE, 9000)
    admit_everyone(other)
    inside = Namespace.of_slot(one.slot)
    inside.run("nft flush ruleset")
    # As a guest that got out of its own machine could: with the slot's address as its source, or any other.
    inside.run(
        f"ip address add {one.slot.host_address}/32 dev uplink",
        "ip address add 198.51.100.99/32 dev uplink",
        f"ip route replace default via {net.pool.plan.host_end(one.slot.index)} src {one.slot.host_address}",
    )
    assert await talk_udp(inside, SITE, 9000) == "answered"
    for address in (HOST_PUBLIC, other.slot.host_address, net.pool.plan.host_end(one.slot.index)):
        assert await talk(inside, address, PORT) == "silent"
    assert await talk_udp(inside, SITE, 9000, source="198.51.100.99") == "silent"
    assert len(echo.senders) == 1
    inside.close()


async def test_spoofed_sources_go_nowhere(net: Net) -> None:
    guest, other = await net.guest(), await net.guest()
    _, echo = await net.serve_udp(SITE, 9000)
    for source in (other.slot.host_address, "198.51.100.99", "169.254.0.22"):
        guest.netns.run(f"ip address add {source}/32 dev eth0")
        assert await talk_udp(guest.netns, SITE, 9000, source=source) == "silent"
        guest.netns.run(f"ip address del {source}/32 dev eth0")
    assert echo.senders == []
    assert await talk_udp(guest.netns, SITE, 9000) == "answered"


async def test_one_guest_cannot_fill_the_hosts_connection_table(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruleset, "MAX_FLOWS", 50)
    guest = await net.guest()
    await net.serve(guest.netns, "0.0.0.0")
    with guest.netns.socket(socket.SOCK_DGRAM) as client:
        for port in range(9000, 9200):
            client.sendto(b"scan", (OTHER_SITE, port))
    assert await talk(guest.netns, SITE, PORT) == "silent"
    assert int(net.world.host.run("cat /proc/sys/net/netfilter/nf_conntrack_count")) <= 50
    assert await talk(net.world.host, guest.slot.host_address, PORT) == "answered"


async def test_ipv6_is_off(net: Net) -> None:
    guest = await net.guest()
    inside = Namespace.of_slot(guest.slot)
    assert inside.run("ip -6 address show") == ""
    inside.close()


@pytest.mark.parametrize(
    ("policy", "reached"),
    [
        (OPEN, {SITE, OTHER_SITE, CLASS_E}),
        (NetworkPolicy(internet=False), set()),
        (NetworkPolicy(deny_out=(EVERYTHING,)), set()),
        (NetworkPolicy(deny_out=("203.0.113.0/24",)), {OTHER_SITE, CLASS_E}),
        (NetworkPolicy(deny_out=("240.0.0.0/4",)), {SITE, OTHER_SITE}),
        (NetworkPolicy(deny_out=("128.0.0.0/1",)), set()),
        (NetworkPolicy(deny_out=("255.255.255.255/32", "203.0.113.2")), {OTHER_SITE, CLASS_E}),
        (NetworkPolicy(internet=False, allow_out=("240.0.0.0/4",)), {CLASS_E}),
        (NetworkPolicy(internet=False, allow_out=(f"{SITE}/32",)), {SITE}),
        (NetworkPolicy(allow_out=(SITE,), deny_out=(EVERYTHING,)), {SITE}),
        (NetworkPolicy(allow_out=(EVERYTHING,), deny_out=(SITE,)), {SITE, OTHER_SITE, CLASS_E}),
        (NetworkPolicy(allow_out=(SITE,)), {SITE, OTHER_SITE, CLASS_E}),
    ],
)
async def test_policies(net: Net, policy: NetworkPolicy, reached: set[str]) -> None:
    guest = await net.guest(policy)
    outcomes = {address: await talk(guest.netns, address, PORT) for address in (SITE, OTHER_SITE, CLASS_E)}
    expected = {address: "answered" if address in reached else "refused" for address in outcomes}
    assert outcomes == expected
    await net.serve(guest.netns, "0.0.0.0")
    assert await talk(net.world.host, guest.slot.host_address, PORT) == "answered"


async def test_names_resolve_unless_nothing_is_reachable(net: Net) -> None:
    await net.serve_udp(RESOLVER, 53)
    await net.serve(net.world.internet, RESOLVER, 53)
    guest = await net.guest(NetworkPolicy(internet=False, allow_out=(SITE,)))
    assert await talk_udp(guest.netns, RESOLVER, 53) == "answered"
    assert await talk(guest.netns, RESOLVER, 53) == "answered"
    assert await talk(guest.netns, RESOLVER, PORT) == "refused"
    await net.pool.set_policy(guest.slot, NetworkPolicy(internet=False))
    assert await talk_udp(guest.netns, RESOLVER, 53) == "refused"


async def test_a_tightened_policy_cuts_what_flows(net: Net) -> None:
    guest = await net.guest()
    await net.serve(guest.netns, "0.0.0.0")
    kept = await connect(guest.netns, OTHER_SITE, PORT)
    cut = await connect(guest.netns, SITE, PORT)
    inbound = await connect(net.world.host, guest.slot.host_address, PORT)
    for flow in (kept, cut, inbound):
        assert await exchange(flow) == b"ping"
    await net.pool.set_policy(guest.slot, NetworkPolicy(deny_out=(SITE,)))
    with pytest.raises(ConnectionResetError):
        await exchange(cut)
    for flow in (kept, inbound):
        assert await exchange(flow) == b"ping"
        flow.close()
    cut.close()
    await net.pool.set_policy(guest.slot, OPEN)
    assert await talk(guest.netns, SITE, PORT) == "answered"


async def test_a_cut_flow_carries_nothing_inward(net: Net) -> None:
    guest = await net.guest()
    transport, echo = await net.serve_udp(SITE, 9000)
    loop = asyncio.get_running_loop()
    with guest.netns.socket(socket.SOCK_DGRAM) as client:
        client.connect((SITE, 9000))
        assert await exchange(client) == b"ping"
        peer = (HOST_PUBLIC, client.getsockname()[1])
        transport.sendto(b"before", peer)
        assert await asyncio.wait_for(loop.sock_recv(client, 100), 1) == b"before"
        await net.pool.set_policy(guest.slot, NetworkPolicy(internet=False))
        transport.sendto(b"after", peer)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.sock_recv(client, 100), 0.3)
    assert echo.senders == [HOST_PUBLIC]


async def test_a_refused_policy_leaves_the_old_one(net: Net) -> None:
    guest = await net.guest(NetworkPolicy(deny_out=(SITE,)))
    with pytest.raises(InvalidRequest):
        await net.pool.set_policy(guest.slot, NetworkPolicy(allow_out=("example.com",)))
    assert await talk(guest.netns, SITE, PORT) == "refused"
    with pytest.raises(InvalidRequest):
        await net.pool.acquire("test", NetworkPolicy(deny_out=("nonsense",)))
    net.pool.release(guest.slot)
    with pytest.raises(NotFound):
        await net.pool.set_policy(guest.slot, OPEN)


async def test_a_policy_dies_with_its_sandbox(net: Net) -> None:
    for policy, outcome in ((NetworkPolicy(internet=False), "refused"), (OPEN, "answered")) * 2:
        slot = await net.pool.acquire("test", policy)
        guest = Guest(slot)
        assert await talk(guest.netns, SITE, PORT) == outcome
        guest.close()
        net.pool.release(slot)


async def test_flows_outlive_a_succession(net: Net) -> None:
    guest = await net.guest()
    await net.serve(guest.netns, "0.0.0.0")
    inbound = await connect(net.world.host, guest.slot.host_address, PORT)
    outbound = await connect(guest.netns, SITE, PORT)
    for _ in range(5):
        for flow in (inbound, outbound):
            assert await exchange(flow) == b"ping"
        guest.succeed()
    inbound.close()
    outbound.close()
