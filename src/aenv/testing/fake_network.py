"""Network slots and a front door without a network, on the surface of `SlotPool` and `FrontDoor`.

What outlives a server (the slots that exist, the routes edge holds) is in `FakeNetwork`; pools and front doors of
several servers, one after another, work on one.
"""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

from aenv.errors import NotFound, OperationFailed
from aenv.ids import SandboxId
from aenv.ledger import Ledger
from aenv.network.policy import NetworkPolicy
from aenv.network.slot import Slot
from aenv.node.front_door import Route
from aenv.testing.fake_agent import FakeAgent
from aenv.testing.fake_vmm import FakeHost
from aenv.vmm.contract import NetworkAttachment

LEDGER_KIND = "slot"


class FakeNetwork:
    """Addresses are in 127/8, a guest agent on each slot's; none is given out twice."""

    def __init__(self, host: FakeHost, *, uid: int) -> None:
        self.host = host
        self.uid = uid
        self.slots: dict[int, Slot] = {}
        self.agents: dict[int, FakeAgent] = {}
        self.policies: dict[int, NetworkPolicy] = {}
        self.routes: dict[SandboxId, Route] = {}
        self.mistakes: list[str] = []
        """What a node must never do; tests demand that it is empty."""
        self._retired: list[FakeAgent] = []
        self._indexes = itertools.count(1)
        self._net = f"127.{128 + os.getpid() % 100}"

    async def make(self, policy: NetworkPolicy) -> Slot:
        index = next(self._indexes)
        address = f"{self._net}.{index >> 8}.{index & 255}"
        slot = Slot(index=index, netns=Path(f"/fake/{index}"), host_address=address, uid=self.uid)
        self.agents[index] = agent = FakeAgent(self.host, attachment(slot))
        await agent.start(address)
        self.slots[index], self.policies[index] = slot, policy
        return slot

    def free(self, index: int) -> None:
        slot = self.slots.pop(index, None)
        if slot is None:
            self.mistakes.append(f"slot {index} freed twice")
            return
        # Its socket stays: closing one that is just accepting a connection loses that one.
        self._retired.append(self.agents.pop(index))
        for sandbox, route in self.routes.items():
            if route.address == slot.host_address:
                self.mistakes.append(f"slot {index} freed under the route of {sandbox}")
        if self.host.process_on(attachment(slot)) is not None:
            self.mistakes.append(f"slot {index} freed under a VM")

    def lose_all(self) -> None:
        """As when the host's power fails."""
        self._retired += self.agents.values()
        for things in (self.slots, self.agents, self.policies, self.routes):
            things.clear()

    def close(self) -> None:
        """Nobody may be connecting any more."""
        for agent in (*self._retired, *self.agents.values()):
            agent.close()


class FakeSlotPool:
    """See `aenv.network.pool.SlotPool`. Slots are made when asked for and gone when released."""

    def __init__(self, network: FakeNetwork, ledger: Ledger) -> None:
        self.dns_servers = ["192.0.2.53"]
        self._network = network
        self._ledger = ledger
        self._in_use: dict[int, Slot] = {}

    @property
    def ready(self) -> int:
        return 0

    @property
    def in_use(self) -> tuple[Slot, ...]:
        return tuple(self._in_use.values())

    async def acquire(self, owner: str, policy: NetworkPolicy) -> Slot:
        slot = await self._network.make(policy)
        self._in_use[slot.index] = slot
        self.assign(slot, owner)
        return slot

    def release(self, slot: Slot) -> None:
        if self._in_use.pop(slot.index, None) is not None:
            self._free(slot.index)

    def assign(self, slot: Slot, owner: str) -> None:
        self._ledger.record(LEDGER_KIND, str(slot.index), owner=owner)

    async def set_policy(self, slot: Slot, policy: NetworkPolicy) -> None:
        if slot.index not in self._in_use:
            raise NotFound(f"network slot {slot.index} is not in use")
        self._network.policies[slot.index] = policy

    async def adopt(self, index: int) -> Slot:
        if index not in self._network.slots:
            raise OperationFailed(f"network slot {index} was not left by an earlier server")
        self._in_use[index] = self._network.slots[index]
        return self._in_use[index]

    async def sweep(self, keep: set[int]) -> None:
        for index in sorted(set(self._network.slots) - keep - set(self._in_use)):
            self._free(index)

    def _free(self, index: int) -> None:
        self._network.free(index)
        self._ledger.erase(LEDGER_KIND, str(index))


class FakeFrontDoor:
    """See `aenv.node.front_door.FrontDoor`."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    async def publish(self, sandbox_id: SandboxId, route: Route) -> None:
        held = self._network.routes.get(sandbox_id)
        if held is not None and held.generation > route.generation:
            raise OperationFailed(f"edge refused the route of sandbox {sandbox_id}: a newer generation is there")
        if route.address not in {slot.host_address for slot in self._network.slots.values()}:
            self._network.mistakes.append(f"a route of {sandbox_id} to {route.address}, where nothing is")
        self._network.routes[sandbox_id] = route

    async def withdraw(self, sandbox_id: SandboxId, generation: int) -> None:
        held = self._network.routes.get(sandbox_id)
        if held is not None and held.generation <= generation:
            del self._network.routes[sandbox_id]

    async def sync(self, routes: Mapping[SandboxId, Route]) -> None:
        self._network.routes = dict(routes)


def attachment(slot: Slot) -> NetworkAttachment:
    return NetworkAttachment(slot.netns, slot.tap, slot.mac)
