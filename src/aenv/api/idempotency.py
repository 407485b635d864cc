"""`Idempotency-Key`: a create that is repeated, because its answer was lost, gets the sandbox of the first.

The window is this process's memory: the last MAX_KEYS keys, each for WINDOW_S. After a restart of the server a repeat
makes a new sandbox, which its time to live ends.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from aenv.aiokit import TaskSet
from aenv.clock import Clock
from aenv.errors import Conflict
from aenv.node.views import CreateRequest, SandboxView

WINDOW_S = 3600.0
MAX_KEYS = 10_000


@dataclass(frozen=True)
class _Create:
    request: CreateRequest
    task: asyncio.Task[SandboxView]
    until_s: float


class IdempotentCreates:
    def __init__(self, tasks: TaskSet, clock: Clock) -> None:
        self._tasks = tasks
        self._clock = clock
        self._creates: OrderedDict[str, _Create] = OrderedDict()

    async def create(self, key: str, request: CreateRequest, work: Coroutine[Any, Any, SandboxView]) -> SandboxView:
        """The result of `work`, or that of the create which had this key before; `work` is dropped then.

        A repeat of one under way waits for it. A create that fails leaves its key free. Raises: Conflict when the key
        was used for another request.
        """
        now_s = self._clock.monotonic_s()
        before = self._creates.get(key)
        if before is not None and before.until_s > now_s:
            work.close()
            if before.request != request:
                raise Conflict("Idempotency-Key: used for another request before")
            return await asyncio.shield(before.task)
        task = self._tasks.start(work, name="create")
        self._creates[key] = _Create(request, task, now_s + WINDOW_S)
        self._creates.move_to_end(key)
        task.add_done_callback(lambda done: self._settle(key, done))
        while len(self._creates) > MAX_KEYS:
            self._creates.popitem(last=False)
        return await asyncio.shield(task)

    def _settle(self, key: str, done: asyncio.Task[SandboxView]) -> None:
        create = self._creates.get(key)
        if create is not None and create.task is done and (done.cancelled() or done.exception() is not None):
            del self._creates[key]
