"""Times to live: an ordered index and one task that sleeps until the earliest deadline. Cost of waiting: nothing; of
a change: O(log n).
"""

import asyncio
import heapq
from collections.abc import Callable
from datetime import datetime

from aenv.clock import Clock
from aenv.ids import SandboxId

_LONGEST_SLEEP_S = 60.0
"""The wall clock may be stepped while we sleep; it is looked at again at least this often."""

_SPARE = 64
"""Deadlines that no longer hold are left in the heap until they come up, or are more than those that do."""


class Deadlines:
    """`expired(sandbox)` is called once per deadline, from the task running `run`; a deadline set again replaces the
    one before.
    """

    def __init__(self, clock: Clock, expired: Callable[[SandboxId], None]) -> None:
        self._clock = clock
        self._expired = expired
        self._due: dict[SandboxId, datetime] = {}
        self._heap: list[tuple[datetime, SandboxId]] = []
        self._changed = asyncio.Event()

    def set(self, sandbox: SandboxId, due: datetime) -> None:
        self._due[sandbox] = due
        if len(self._heap) > 2 * len(self._due) + _SPARE:
            self._heap = [(at, each) for each, at in self._due.items() if each != sandbox]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (due, sandbox))
        if self._heap[0] == (due, sandbox):
            self._changed.set()

    def clear(self, sandbox: SandboxId) -> None:
        self._due.pop(sandbox, None)

    async def run(self) -> None:
        while True:
            self._changed.clear()
            wait_s = self._fire()
            sleeping = asyncio.ensure_future(self._clock.sleep(wait_s)) if wait_s is not None else None
            changed = asyncio.ensure_future(self._changed.wait())
            waiting = [task for task in (sleeping, changed) if task is not None]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()

    def _fire(self) -> float | None:
        """Announce what is due; returns the seconds until the next, None when there is none."""
        now = self._clock.now()
        while self._heap:
            due, sandbox = self._heap[0]
            if self._due.get(sandbox) != due:
                heapq.heappop(self._heap)
            elif due <= now:
                heapq.heappop(self._heap)
                del self._due[sandbox]
                self._expired(sandbox)
            else:
                return min((due - now).total_seconds(), _LONGEST_SLEEP_S)
        return None
