"""A bound on how many things happen at once, with a queue in front of it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aenv.clock import Clock
from aenv.errors import TooManyStarts


class Bounded:
    """Lets `limit` through at once and the others in order of arrival; turns away who waited for `wait_s`."""

    def __init__(self, limit: int, *, wait_s: float, clock: Clock) -> None:
        if limit < 1:
            raise ValueError(f"limit {limit}: at least 1")
        self.limit = limit
        self.wait_s = wait_s
        self._clock = clock
        self._in_flight = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def admitted(self, *, patient: bool = False) -> AsyncIterator[None]:
        """Hold one place. Raises: TooManyStarts when none came free in time, unless `patient`; nothing is held then."""
        await self._enter(patient)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, patient: bool) -> None:
        if self._in_flight < self.limit and not self._queue:
            self._in_flight += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        waiting: list[asyncio.Future[None]] = [turn]
        if not patient:
            waiting.append(asyncio.create_task(self._clock.sleep(self.wait_s), name="admission deadline"))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        finally:
            for timer in waiting[1:]:
                timer.cancel()
        if not turn.done():
            self._give_up(turn)
            raise TooManyStarts(
                f"{self.limit} starts are in flight and {self.waiting} more wait",
                hint=f"none came free within {self.wait_s:g} s",
                retry_after_s=max(1, round(self.wait_s / 2)),
            )

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn.done():
            self._leave()
        else:
            with suppress(ValueError):
                self._queue.remove(turn)

    def _leave(self) -> None:
        """Hand the place to the next in the queue, so that nobody who comes later overtakes."""
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self._in_flight -= 1
