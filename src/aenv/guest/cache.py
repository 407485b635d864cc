"""A cache of directories: built once, appearing whole or not at all, never changed afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aenv.guest.commands import run

Progress = Callable[[str], None]
"""Receives lines for people about work that takes noticeable time."""

Build = Callable[[Path], Awaitable[None]]
"""Fills the (existing, empty) directory it is given."""


def content_key(*parts: object) -> str:
    """A short name for what is made from these JSON-able inputs: equal inputs, equal key."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def ensure_directory(path: Path, build: Build, *, replace: bool = False) -> bool:
    """Make sure that `path` exists, calling `build` when it does not, or always with `replace`.

    Builders in other processes and tasks are waited for. What `build` left is safe on disk before `path`
    appears. After a failure, a cancellation or a kill, `path` is as it was before; the rest of a killed build
    is removed by the next one.

    Returns: whether it was built by this call. Raises: what `build` raises.
    """
    if path.is_dir() and not replace:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    async with _locked(path.with_name(f".{path.name}.lock")):
        if path.is_dir() and not replace:
            return False
        work = path.with_name(f".{path.name}.part")
        await asyncio.to_thread(_remove, work)
        work.mkdir()
        try:
            await build(work)
            await asyncio.to_thread(_publish, work, path)
        finally:
            await asyncio.to_thread(_remove, work)
    return True


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    # The lock belongs to the open file description, so the program that waits for it takes it for us; unlike
    # a thread blocked in flock(2) it can be cancelled.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        await run("flock", "--exclusive", str(descriptor), pass_fds=[descriptor])
        yield
    finally:
        os.close(descriptor)


def _publish(work: Path, target: Path) -> None:
    # Programs that are not root read the cache, whatever the builder's umask.
    for directory, _, names in os.walk(work):
        for name in [".", *names]:
            path = Path(directory, name)
            path.chmod(0o755 if path.is_dir() else 0o644)
            _sync(path)
    if target.is_dir():
        # Open files of the old one live on; only its name is gone for the moment between the two calls.
        discarded = target.with_name(f".{target.name}.old")
        _remove(discarded)
        target.rename(discarded)
        work.rename(target)
        _remove(discarded)
    else:
        work.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
