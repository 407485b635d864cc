"""Supervised tasks and graceful stop on asyncio. Knows nothing of sandboxes."""
