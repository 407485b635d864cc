"""One queue per key: calls of one key run one at a time and in order, those of different keys in parallel."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

import structlog

from aenv.aiokit.tasks import TaskSet

_log = structlog.get_logger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SerialQueues(Generic[K]):
    """A worker task lives for a key only while there are calls for it.

    A caller that is cancelled loses the answer; a call that was submitted runs all the same.
    """

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks
        self._queues: dict[K, deque[_Call]] = {}

    def submit(self, key: K, work: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Queue `work`. The future gets its result or exception; cancelling the future does not stop it.

        Raises: RuntimeError when the task set is closed. Futures not answered when it closes are cancelled.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue = self._queues.get(key)
        if queue is None:
            queue = deque()
            worker = self._tasks.spawn(self._drain(key, queue), name=f"queue of {key}")
            # Not a `finally`: a worker that is cancelled before its first step runs no code of its own.
            worker.add_done_callback(lambda _: self._abandon(key, queue))
            self._queues[key] = queue
        queue.append((work, future))
        return future

    def waiting(self, key: K) -> int:
        """Calls of `key` that have not begun."""
        return len(self._queues.get(key, ()))

    async def _drain(self, key: K, queue: "deque[_Call]") -> None:
        while queue:
            work, future = queue.popleft()
            await _carry_out(work, future)
        del self._queues[key]

    def _abandon(self, key: K, queue: "deque[_Call]") -> None:
        """A worker that ended by itself left nothing; for one that was cancelled nobody else will answer."""
        if self._queues.get(key) is queue:
            del self._queues[key]
            for _, future in queue:
                future.cancel()


_Call = tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]


async def _carry_out(work: Callable[[], Awaitable[Any]], future: asyncio.Future[Any]) -> None:
    try:
        result = await work()
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as error:
        if not future.done():
            future.set_exception(error)
        else:
            _log.error("call failed after its caller had left", exc_info=error)
    else:
        if not future.done():
            future.set_result(result)
