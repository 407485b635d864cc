"""Slots come and go whole: claims, failures, crashes, sweeps. Real namespaces in a host of the test's own."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.network_lab import Guest, Lab, Namespace, lab, serve, talk

from aenv.clock import SystemClock
from aenv.errors import HostUnsupported, NoCapacity, OperationFailed, ShuttingDown
from aenv.ids import InstanceId, new_instance_id
from aenv.ledger import Ledger
from aenv.network import build
from aenv.network.namespace import in_fresh_thread
from aenv.network.nft import find_nft
from aenv.network.policy import NetworkPolicy
from aenv.network.pool import LEDGER_KIND, SlotPool
from aenv.network.ruleset import slot_rules
from aenv.network.slot import NETNS_DIRECTORY, SlotPlan
from aenv.settings import Settings

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

OPEN = NetworkPolicy()


def names(instance: InstanceId) -> set[str]:
    return {path.name for path in NETNS_DIRECTORY.glob(f"aenv-{instance}-*")}


@pytest.fixture
def world() -> Iterator[Lab]:
    with lab() as world:
        yield world


class Node:
    """What of a node outlives its server: instance id and ledger."""

    def __init__(self, directory: Path, undo: AsyncExitStack) -> None:
        self.instance = new_instance_id()
        self.ledger = Ledger(directory / self.instance)
        self._undo = undo

    async def server(self, *, size: int = 0, first_index: int | None = None, **settings: str) -> SlotPool:
        configured = Settings(slot_pool_size=size, dns_servers=["1.1.1.1"], **settings)  # type: ignore[arg-type]
        pool = SlotPool(configured, self.instance, self.ledger, SystemClock(), first_index=first_index)
        self._undo.push_async_callback(self._finish, pool)
        await pool.start()
        return pool

    async def _finish(self, pool: SlotPool) -> None:
        for slot in pool.in_use:
            pool.release(slot)
        await pool.close()
        await pool.sweep(set())

    def recorded(self) -> set[int]:
        return {int(entry.name) for entry in self.ledger.entries(LEDGER_KIND)}


@pytest_asyncio.fixture
async def make_node(world: Lab, tmp_path: Path) -> AsyncIterator[Callable[[], Node]]:
    async with AsyncExitStack() as undo:
        yield lambda: Node(tmp_path, undo)


@pytest.fixture
def node(make_node: Callable[[], Node]) -> Node:
    return make_node()


async def until(true: Callable[[], bool]) -> None:
    """Kernel and background work have no event to wait for from outside."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_fifty_cycles_leave_nothing(world: Lab, node: Node) -> None:
    before = world.leftovers()
    pool = await node.server(size=3)
    indexes = []
    for turn in range(50):
        policy = NetworkPolicy(internet=False) if turn % 10 == 0 else OPEN
        slot = await pool.acquire(f"sandbox {turn}", policy)
        indexes.append(slot.index)
        pool.release(slot)
    await pool.close()
    assert len(set(indexes)) == 50
    assert world.leftovers() == before
    assert names(node.instance) == set()
    assert node.recorded() == set()


async def test_a_filled_pool_gives_at_once_and_fills_again(node: Node) -> None:
    pool = await node.server(size=2)
    await until(lambda: pool.ready == 2)
    assert all(entry.owner == "" for entry in node.ledger.entries(LEDGER_KIND))
    taking = asyncio.ensure_future(pool.acquire("mine", OPEN))
    await asyncio.sleep(0)
    assert taking.done()
    slot = taking.result()
    owners = {int(entry.name): entry.owner for entry in node.ledger.entries(LEDGER_KIND)}
    assert owners[slot.index] == "mine"
    await until(lambda: pool.ready == 2)
    assert len(node.recorded()) == 3


async def test_an_abandoned_acquire_leaves_its_slot_to_the_next(node: Node) -> None:
    pool = await node.server()
    asking = asyncio.create_task(pool.acquire("gone", OPEN))
    await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: pool.ready == 1)
    (made,) = node.recorded()
    assert (await pool.acquire("next", OPEN)).index == made


async def test_a_failed_policy_gives_the_slot_back(node: Node) -> None:
    pool = await node.server(size=1)
    await until(lambda: pool.ready == 1)
    (index,) = node.recorded()
    inside = Namespace.of_slot(pool.plan.slot(index))
    inside.run("nft delete table inet aenv")
    inside.close()
    with pytest.raises(OperationFailed, match="nft refused"):
        await pool.acquire("unlucky", NetworkPolicy(internet=False))
    await until(lambda: index not in node.recorded())
    assert f"aenv-{node.instance}-{index}" not in names(node.instance)


async def test_two_nodes_that_want_the_same_indexes(make_node: Callable[[], Node]) -> None:
    one, other = make_node(), make_node()
    pools = [await node.server(first_index=32766) for node in (one, other)]
    wanted: list[Awaitable[object]] = [pool.acquire("x", OPEN) for _ in range(5) for pool in pools]
    await asyncio.gather(*wanted)
    mine, theirs = one.recorded(), other.recorded()
    assert len(mine) == len(theirs) == 5
    assert not mine & theirs
    assert mine | theirs >= {32766, 32767, 1}


async def test_nodes_side_by_side_do_not_touch_each_other(world: Lab, make_node: Callable[[], Node]) -> None:
    one, other = make_node(), make_node()
    closing, staying = await one.server(size=1), await other.server()
    slots = [await closing.acquire("a", OPEN), await staying.acquire("b", OPEN)]
    with ExitStack() as undo:
        guests = []
        for slot in slots:
            guests.append(Guest(slot))
            undo.callback(guests[-1].close)
            server = await serve(guests[-1].netns, "0.0.0.0", 8080)
            undo.callback(server.close)
        for guest, neighbour in (guests, reversed(guests)):
            assert await talk(world.host, guest.slot.host_address, 8080) == "answered"
            assert await talk(guest.netns, neighbour.slot.host_address, 8080) != "answered"
        closing.release(slots[0])
        await closing.close()
        await closing.sweep(set())
        assert names(one.instance) == set()
        assert f"aenv_{one.instance}" not in world.host.run("nft list tables")
        assert await talk(world.host, slots[1].host_address, 8080) == "answered"
        assert names(other.instance) == {slots[1].netns.name}


async def test_after_a_crash_slots_are_adopted_or_swept(world: Lab, make_node: Callable[[], Node]) -> None:
    node, neighbour = make_node(), make_node()
    crashed = await node.server()
    alien = await (await neighbour.server()).acquire("other", OPEN)
    kept, unknown, lost = [await crashed.acquire("x", OPEN) for _ in range(3)]
    await crashed.set_policy(kept, NetworkPolicy(internet=False, allow_out=("203.0.113.2",)))
    # A server closed with slots in use leaves them and its table, as a crashed one does.
    await crashed.close()
    assert f"aenv_{node.instance}" in world.host.run("nft list tables")
    node.ledger.erase(LEDGER_KIND, str(unknown.index))
    node.ledger.record(LEDGER_KIND, "31000", owner="never made")

    server = await node.server(first_index=kept.index)
    assert await server.adopt(kept.index) == kept
    assert await server.adopt(kept.index) == kept
    await server.sweep({kept.index})
    assert names(node.instance) == {kept.netns.name}
    assert node.recorded() == {kept.index}
    assert names(neighbour.instance) == {alien.netns.name}
    with pytest.raises(OperationFailed):
        await server.adopt(lost.index)

    guest = Guest(kept)
    assert await talk(guest.netns, "203.0.113.2", 1) == "refused"
    await server.set_policy(kept, OPEN)
    guest.close()
    assert (await server.acquire("new", OPEN)).index not in {kept.index, alien.index}
    server.release(kept)
    await until(lambda: kept.netns.name not in names(node.instance))


async def test_refilling_before_adoption_spares_slots_in_use(node: Node) -> None:
    first = await node.server(first_index=100)
    slots = [await first.acquire("x", OPEN) for _ in range(3)]
    await first.close()
    second = await node.server(first_index=100, size=2)
    await until(lambda: second.ready == 2)
    for slot in slots:
        assert await second.adopt(slot.index) == slot
    await second.sweep({slot.index for slot in slots})
    assert len(names(node.instance)) == 5


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("ip netns exec {netns} ip link del tap0", "no link tap0"),
        ("ip netns exec {netns} nft flush ruleset", None),
        ("ip netns exec {netns} nft delete table inet aenv", "no packet filter"),
        ("ip route del {address}", "no route"),
        ("ip link del {link}", "no link av"),
    ],
)
async def test_what_is_not_whole_is_not_adopted(world: Lab, node: Node, damage: str, complaint: str | None) -> None:
    first = await node.server()
    slot = await first.acquire("x", OPEN)
    await first.close()
    link = first.plan.link(slot.index)
    world.host.run(damage.format(netns=slot.netns.name, address=slot.host_address, link=link))
    second = await node.server()
    with pytest.raises(OperationFailed, match=complaint or "packet filter"):
        await second.adopt(slot.index)
    await second.sweep(set())
    assert names(node.instance) == set()


STEPS = ("namespace", "veth_pair", "claim", "uplink", "tap", "filter")


class FailingBuilder(build.SlotBuilder):
    """Stops after `done` of its steps."""

    done = 0

    def steps(self) -> Sequence[Callable[[ExitStack], None]]:
        return (*tuple(super().steps())[: self.done], self._fault)

    def _fault(self, _undo: ExitStack) -> None:
        raise OSError("injected")


@pytest.mark.parametrize("done", range(len(STEPS) + 1))
async def test_a_failure_after_any_step_leaves_nothing(world: Lab, node: Node, done: int) -> None:
    await node.server()
    before = world.leftovers()
    plan = SlotPlan(Settings(), node.instance)
    slot = plan.slot(5)
    builder = FailingBuilder(slot, plan, slot_rules(slot, plan, [], []), find_nft())
    builder.done = done
    assert len(super(FailingBuilder, builder).steps()) == len(STEPS)
    with pytest.raises(OperationFailed, match="injected"):
        await in_fresh_thread(builder.build, name="test")
    assert world.leftovers() == before
    assert names(node.instance) == set()


async def test_a_failing_filter_leaves_nothing_and_names_the_step(world: Lab, node: Node) -> None:
    await node.server()
    before = world.leftovers()
    plan = SlotPlan(Settings(), node.instance)
    builder = build.SlotBuilder(plan.slot(5), plan, "nonsense", find_nft())
    with pytest.raises(OperationFailed, match="its filter failed: nft refused"):
        await in_fresh_thread(builder.build, name="test")
    assert world.leftovers() == before


async def test_the_pool_goes_on_after_failures(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await node.server()
    with monkeypatch.context() as patched:
        patched.setattr(build, "SlotBuilder", FailingBuilder)
        with pytest.raises(OperationFailed, match="injected"):
            await pool.acquire("x", OPEN)
    assert node.recorded() == set()
    await pool.acquire("x", OPEN)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_exhausted_range_says_so(node: Node) -> None:
    pool = await node.server(host_interaction_cidr="10.20.0.0/29")
    slots = [await pool.acquire("x", OPEN) for _ in range(pool.plan.last_index)]
    with pytest.raises(NoCapacity, match="all 6 network slots"):
        await pool.acquire("x", OPEN)
    pool.release(slots[2])
    await until(lambda: len(node.recorded()) == 5)
    assert (await pool.acquire("x", OPEN)).index == slots[2].index


async def test_a_closed_pool_gives_nothing(node: Node) -> None:
    pool = await node.server()
    await pool.close()
    with pytest.raises(ShuttingDown):
        await pool.acquire("x", OPEN)
    await pool.close()


async def test_a_kernel_without_nftables_is_told_from_a_bad_slot(
    world: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "nft"
    refusing.write_text("#!/bin/sh\necho 'Error: Operation not supported' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    pool = SlotPool(Settings(), new_instance_id(), Ledger(tmp_path / "ledger"), SystemClock())
    with pytest.raises(HostUnsupported, match="Operation not supported"):
        await pool.start()
    await pool.close()


async def test_many_at_once(node: Node) -> None:
    pool = await node.server(size=4)
    slots = await asyncio.gather(*(pool.acquire("x", OPEN) for _ in range(20)))
    assert len({slot.host_address for slot in slots}) == 20
    for slot in slots:
        pool.release(slot)


async def test_freeing_what_is_not_there_is_fine(node: Node) -> None:
    pool = await node.server()
    await in_fresh_thread(partial(build.free, pool.plan, 7), name="test")
