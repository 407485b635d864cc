"""A clock that tests move."""

import asyncio
import heapq
from datetime import UTC, datetime, timedelta
from itertools import count


class FakeClock:
    """Time stands still until `advance`; sleepers wake in the order of their instants."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed_s = 0.0
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed_s)

    def monotonic_s(self) -> float:
        return self._elapsed_s

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed_s + duration_s, next(self._order), wake))
        await wake

    async def advance(self, duration_s: float) -> None:
        """Move by `duration_s`; sleepers wake on the way, and what they wake runs until it waits again."""
        until_s = self._elapsed_s + duration_s
        await settle()
        while self._sleepers and self._sleepers[0][0] <= until_s:
            at_s, _, wake = heapq.heappop(self._sleepers)
            self._elapsed_s = max(self._elapsed_s, at_s)
            if not wake.done():
                wake.set_result(None)
            await settle()
        self._elapsed_s = until_s


async def settle(rounds: int = 20) -> None:
    """Let ready tasks run, and those they make ready, for a bounded number of rounds of the loop."""
    for _ in range(rounds):
        await asyncio.sleep(0)
