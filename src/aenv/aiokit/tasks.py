"""Background work that has a name, an owner and an end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

T = TypeVar("T")
U = TypeVar("U")
_log = structlog.get_logger(__name__)


async def all_done(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Do both at once, to the end of both, and return their results. Raises: what the first of them that failed raised;
    nothing is under way any more then.
    """
    first, second = await asyncio.gather(one, other, return_exceptions=True)
    if isinstance(first, BaseException):
        raise first
    if isinstance(second, BaseException):
        raise second
    return first, second


class TaskSet:
    """Owns tasks: an exception of one is logged and counted, never lost, and `close` leaves none behind.

    Use as an async context manager, or call `close`. A closed set takes no more tasks.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures = 0
        """Tasks that ended in an exception nobody was waiting for."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def __aenter__(self) -> "TaskSet":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run `work` in the background. Raises: RuntimeError when the set is closed; nothing is started."""
        task = self.start(work, name=name)
        task.add_done_callback(self._report)
        return task

    def start(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """As `spawn`, for a task that somebody awaits: its exception is theirs to see."""
        if self._closed:
            work.close()
            raise RuntimeError(f"task {name!r}: {self.name} is closed")
        task = asyncio.create_task(work, name=f"{self.name}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def shielded(self, work: Coroutine[Any, Any, T], *, name: str) -> T:
        """Run `work` to its end whatever becomes of the caller, and return its result.

        A cancelled caller gets its CancelledError at once; the work goes on, and its exception is logged.
        """
        task = self.start(work, name=name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._report)
            raise

    async def close(self) -> None:
        """Cancel what still runs and wait until all of it has ended. Idempotent."""
        self._closed = True
        current = asyncio.current_task()
        while running := [task for task in self._tasks if task is not current]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _report(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.failures += 1
        _log.error("background task failed", task=task.get_name(), exc_info=error)
