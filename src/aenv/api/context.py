"""What the routes of one app share."""

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from aenv.aiokit import TaskSet
from aenv.api.idempotency import IdempotentCreates
from aenv.api.metrics import Metrics
from aenv.node.service import NodeService
from aenv.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    node: NodeService
    settings: Settings
    tasks: TaskSet
    creates: IdempotentCreates
    metrics: Metrics

    async def finish(self, work: Coroutine[Any, Any, T], *, name: str) -> T:
        """The node's `work`, which a client that hangs up does not stop."""
        return await self.tasks.shielded(work, name=name)


async def _context(request: Request) -> Context:
    # A coroutine: FastAPI runs plain functions in a thread.
    context: Context = request.app.state.context
    return context


Api = Annotated[Context, Depends(_context)]
