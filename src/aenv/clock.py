"""Time as a dependency: code that waits or compares deadlines takes a Clock, so tests can move it.

Wall-clock instants are aware UTC datetimes; durations are float seconds named `…_s`.
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Wall clock, UTC."""

    def monotonic_s(self) -> float:
        """Seconds that never go back, for measuring durations."""

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds of this clock."""


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)
