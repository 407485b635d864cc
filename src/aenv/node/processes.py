"""Finding processes of this node that no record names: by the working directory in their command line."""

import asyncio
import os
import signal
from collections.abc import Collection
from pathlib import Path


async def kill_machine_processes(machines: Path, keep: Collection[str]) -> int:
    """Kill every process whose command line names a directory below `machines` that is not in `keep`; wait until they are gone."""
    prefix = os.fsencode(f"{machines}/")
    killed = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            pidfd = os.pidfd_open(int(entry.name))
        except OSError:
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            names = {part.split(b"/")[0].split(b",")[0].split(b"\0")[0].decode() for part in command.split(prefix)[1:]}
            if names and not names & set(keep):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                await _ended(pidfd)
                killed += 1
        except OSError:
            continue
        finally:
            os.close(pidfd)
    return killed


async def _ended(pidfd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
