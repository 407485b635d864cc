"""Supervised tasks, serial queues and admission on asyncio. Knows nothing of sandboxes.

* `TaskSet`: background tasks whose failures are seen, and which end with their owner
* `SerialQueues`: one queue per key
* `Bounded`: n at once, the rest in line until a deadline
"""

from aenv.aiokit.bounded import Bounded
from aenv.aiokit.serial import SerialQueues
from aenv.aiokit.tasks import TaskSet

__all__ = ["Bounded", "SerialQueues", "TaskSet"]
