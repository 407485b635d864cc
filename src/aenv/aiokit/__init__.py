"""Supervised tasks and admission on asyncio. Knows nothing of sandboxes.

* `TaskSet`: background tasks whose failures are seen, and which end with their owner
* `Bounded`: n at once, the rest in line until a deadline
* `all_done`: several things at once, none of them cut short by the failure of another
"""

from aenv.aiokit.bounded import Bounded
from aenv.aiokit.tasks import TaskSet, all_done

__all__ = ["Bounded", "TaskSet", "all_done"]
