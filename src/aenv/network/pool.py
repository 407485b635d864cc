"""The node's slots: some ready, some in use, none used twice.

A released slot is destroyed and a new one made, off the path of any request, so that no policy, flow or
address of one sandbox can reach the next (docs/adr/0003-slots-are-not-reused.md). Slots in use outlive the
server; the next one adopts them from the ledger.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aenv.clock import Clock
from aenv.errors import AenvError, NotFound, OperationFailed, ShuttingDown
from aenv.ids import InstanceId
from aenv.ledger import Ledger
from aenv.network import build, nft
from aenv.network.host import prepare_host, require_host
from aenv.network.indexes import IndexSequence
from aenv.network.namespace import in_fresh_thread
from aenv.network.policy import NetworkPolicy
from aenv.network.reachability import NEVER_REACHABLE, Range, reachable
from aenv.network.resolvers import resolvers
from aenv.network.ruleset import host_rules, no_host_rules, policy_rules, slot_rules
from aenv.network.slot import Slot, SlotPlan
from aenv.settings import Settings

T = TypeVar("T")

LEDGER_KIND = "slot"
REFILL_RETRY_S = 5.0

_DEFAULT_POLICY = NetworkPolicy()
_CHANGES_AT_ONCE = 4
"""Slots being made or freed at a time: most of it is waiting for the kernel, but each takes its global
network lock."""

_log = logging.getLogger(__name__)


class SlotPool:
    """All calls from one event loop. `start` first; `close` leaves the slots in use as they are.

    Args:
        first_index: where to start looking for free indexes; random when None.

    Raises: InvalidRequest for settings that make no network.
    """

    def __init__(
        self,
        settings: Settings,
        instance_id: InstanceId,
        ledger: Ledger,
        clock: Clock,
        *,
        first_index: int | None = None,
    ) -> None:
        self.plan = SlotPlan(settings, instance_id)
        self.dns_servers = resolvers(settings)
        """What a guest should use; reachable on port 53 unless its policy leaves nothing reachable."""
        self._never = (
            *NEVER_REACHABLE,
            *settings.denied_cidrs,
            settings.host_interaction_cidr,
            settings.veth_cidr,
        )
        reachable(_DEFAULT_POLICY, self._never)
        self._size = settings.slot_pool_size
        self._ledger = ledger
        self._clock = clock
        first = first_index or random.randint(1, self.plan.last_index)
        self._sequence = IndexSequence(first, self.plan.last_index)
        self._held: set[int] = set()
        """Indexes of slots that are being made, ready, in use, or being freed."""
        self._inherited: set[int] = set()
        """Indexes of slots an earlier server left, neither adopted nor swept yet."""
        self._ready: deque[Slot] = deque()
        self._in_use: dict[int, Slot] = {}
        self._jobs: set[asyncio.Task[Any]] = set()
        self._changes = asyncio.Semaphore(_CHANGES_AT_ONCE)
        self._wanted = asyncio.Event()
        self._refill: asyncio.Task[None] | None = None
        self._nft = Path("nft")
        self._started = False
        self._closed = False

    @property
    def ready(self) -> int:
        """How many slots an `acquire` would get at once."""
        return len(self._ready)

    @property
    def in_use(self) -> tuple[Slot, ...]:
        return tuple(self._in_use.values())

    async def start(self) -> None:
        """Prepare the host and begin to fill the pool; call `adopt` and `sweep` afterwards. Raises:
        HostUnsupported."""
        self._nft = require_host()
        rules = host_rules(self.plan, self.dns_servers)
        await in_fresh_thread(partial(prepare_host, self._nft, rules), name="network-start")
        self._inherited = await self._existing()
        if not self.dns_servers:
            _log.warning("no DNS server a sandbox could reach is configured; set AENV_DNS_SERVERS")
        self._started = True
        self._wanted.set()
        self._refill = asyncio.create_task(self._keep_filled(), name="network-slot-refill")

    async def acquire(self, owner: str, policy: NetworkPolicy) -> Slot:
        """A slot nobody used before, under `policy`, recorded for `owner`. At once with the default policy
        and a filled pool.

        Raises: InvalidRequest (policy), NoCapacity, OperationFailed, ShuttingDown; nothing is taken then.
        """
        rules = self._policy_rules(policy)
        while not self._ready:
            self._require_open()
            # A job of the pool's: should this call be cancelled, the slot is there for the next.
            await asyncio.shield(self._job(self._make(), "make"))
        self._require_open()
        slot = self._ready.popleft()
        self._wanted.set()
        self._in_use[slot.index] = slot
        try:
            self._record(slot, owner)
            if policy != _DEFAULT_POLICY:
                await self._apply(slot, rules)
        except BaseException:
            self.release(slot)
            raise
        return slot

    def release(self, slot: Slot) -> None:
        """Begin to destroy `slot`, whose VM is gone; returns at once. Idempotent. A failure is logged and
        left to `sweep`."""
        if self._in_use.pop(slot.index, None) is not None:
            self._job(self._free_logged(slot.index), "free")

    def assign(self, slot: Slot, owner: str) -> None:
        """Record another owner of a slot in use."""
        self._record(slot, owner)

    async def set_policy(self, slot: Slot, policy: NetworkPolicy) -> None:
        """Replace the policy of a slot in use, at once and for flows that exist too.

        Raises: InvalidRequest, NotFound (the slot is not in use), OperationFailed; the old policy holds then.
        """
        if slot.index not in self._in_use:
            raise NotFound(f"network slot {slot.index} is not in use")
        await self._apply(slot, self._policy_rules(policy))

    async def adopt(self, index: int) -> Slot:
        """Take over a slot in use that an earlier server made. Its policy is what it was. Idempotent.

        Raises: OperationFailed when it is not whole; it is not in use then, and `sweep` frees it.
        """
        if index in self._in_use:
            return self._in_use[index]
        if index not in self._inherited:
            raise OperationFailed(f"network slot {index} was not left by an earlier server")
        slot = self.plan.slot(index)
        check = partial(build.verify, slot, self.plan, self._nft)
        await in_fresh_thread(check, name=f"network-adopt-{index}")
        self._inherited.discard(index)
        self._held.add(index)
        self._in_use[index] = slot
        return slot

    async def sweep(self, keep: set[int]) -> None:
        """Free every slot of this node that is neither in `keep` nor held by this pool, whether the ledger
        knows it or not.

        Raises: OperationFailed when one could not be freed; the others are.
        """
        stale = sorted(await self._existing() - keep - self._held)
        self._held.update(stale)
        jobs = [self._job(self._free(index), "sweep") for index in stale]
        outcomes = await asyncio.shield(asyncio.gather(*jobs, return_exceptions=True))
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise failures[0]

    async def close(self) -> None:
        """Destroy the ready slots and wait for what is under way. The node's table goes too unless slots are
        in use. Idempotent."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            with suppress(asyncio.CancelledError):
                await self._refill
            self._refill = None
        await self._finish_jobs()
        while self._ready:
            self._job(self._free_logged(self._ready.popleft().index), "free")
        await self._finish_jobs()
        if self._started and not self._in_use:
            self._started = False
            remove = partial(nft.apply, self._nft, no_host_rules(self.plan))
            await in_fresh_thread(remove, name="network-close")

    # making and freeing

    async def _keep_filled(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while len(self._ready) < self._size:
                    await asyncio.shield(self._job(self._make(), "make"))
            except AenvError as error:
                _log.warning("cannot keep network slots ready: %s", error)
                await self._clock.sleep(REFILL_RETRY_S)
                self._wanted.set()

    async def _make(self) -> None:
        """Add a slot under the default policy to the ready ones."""
        taken: set[int] = set()
        async with self._changes:
            while True:
                index = self._sequence.take(self._held | self._inherited | taken)
                try:
                    await self._build(self.plan.slot(index))
                    break
                except build.IndexTakenError:
                    taken = await in_fresh_thread(partial(build.claimed, self.plan), name="network-scan")
                    taken.add(index)
        self._ready.append(self.plan.slot(index))

    async def _build(self, slot: Slot) -> None:
        allowed, dns = self._opened(_DEFAULT_POLICY)
        rules = slot_rules(slot, self.plan, allowed, dns)
        builder = build.SlotBuilder(slot, self.plan, rules, self._nft)
        self._held.add(slot.index)
        self._record(slot, "")
        try:
            await in_fresh_thread(builder.build, name=f"network-make-{slot.index}")
        except BaseException:
            self._held.discard(slot.index)
            self._ledger.erase(LEDGER_KIND, str(slot.index))
            raise

    async def _free(self, index: int) -> None:
        try:
            async with self._changes:
                await in_fresh_thread(partial(build.free, self.plan, index), name=f"network-free-{index}")
            self._ledger.erase(LEDGER_KIND, str(index))
            self._inherited.discard(index)
        finally:
            self._held.discard(index)

    async def _free_logged(self, index: int) -> None:
        try:
            await self._free(index)
        except OperationFailed as error:
            _log.error("network slot %d is left behind: %s", index, error)

    # policies

    def _opened(self, policy: NetworkPolicy) -> tuple[list[Range], tuple[str, ...]]:
        """What a policy opens. A sandbox that may reach nothing gets no DNS: names are a way out as good as
        any."""
        allowed = reachable(policy, self._never)
        return allowed, self.dns_servers if allowed else ()

    def _policy_rules(self, policy: NetworkPolicy) -> str:
        return policy_rules(*self._opened(policy))

    async def _apply(self, slot: Slot, rules: str) -> None:
        work = partial(build.set_policy, slot, rules, self._nft)
        await asyncio.shield(self._job(in_fresh_thread(work, name=f"network-policy-{slot.index}"), "policy"))

    # bookkeeping

    async def _existing(self) -> set[int]:
        """Every index of which the kernel or the ledger has something of this node."""
        found = await in_fresh_thread(partial(build.existing, self.plan), name="network-list")
        names = (entry.name for entry in self._ledger.entries(LEDGER_KIND))
        return found | {int(name) for name in names if name.isdecimal()}

    def _record(self, slot: Slot, owner: str) -> None:
        self._ledger.record(LEDGER_KIND, str(slot.index), owner=owner, host_address=slot.host_address)

    def _require_open(self) -> None:
        if self._closed or not self._started:
            raise ShuttingDown("the network of this node is closed")

    def _job(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        """A task the pool finishes whatever becomes of its caller."""
        task = asyncio.create_task(work, name=f"network-slot-{what}")
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    async def _finish_jobs(self) -> None:
        while self._jobs:
            await asyncio.gather(*self._jobs, return_exceptions=True)
