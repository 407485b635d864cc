"""What this node has room for: memory counted by what sandboxes were promised, disk by what the file system has left.

State is held here and nowhere else; counts are taken before a start and given back at its end, so that simultaneous
starts cannot pass together.
"""

import os
from pathlib import Path

from aenv.errors import NoCapacity, StorageFull
from aenv.settings import Settings

MIB = 1024 * 1024


class Capacity:
    def __init__(self, settings: Settings, *, host_memory_mib: int | None = None) -> None:
        self._home = settings.home
        self._min_free_mib = settings.min_free_disk_mib
        host = host_memory_mib or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
        self.memory_limit_mib = int(host * settings.memory_overcommit)
        self.memory_taken_mib = 0

    def take_memory(self, memory_mib: int, *, force: bool = False) -> None:
        """Count a machine in. `force` is for those that run already. Raises: NoCapacity."""
        if not force and self.memory_taken_mib + memory_mib > self.memory_limit_mib:
            raise NoCapacity(
                f"{memory_mib} MiB of memory asked, "
                f"{self.memory_limit_mib - self.memory_taken_mib} of {self.memory_limit_mib} MiB left",
                hint="pause or kill sandboxes, or raise memory_overcommit",
                retry_after_s=5,
            )
        self.memory_taken_mib += memory_mib

    def give_memory(self, memory_mib: int) -> None:
        self.memory_taken_mib -= memory_mib

    def check_disk(self, path: Path | None = None) -> None:
        """Raises: StorageFull when less than the minimum is free."""
        stat = os.statvfs(path or self._home)
        free_mib = stat.f_bavail * stat.f_frsize // MIB
        if free_mib < self._min_free_mib:
            raise StorageFull(
                f"{free_mib} MiB free in {self._home}, {self._min_free_mib} needed to begin",
                hint="delete snapshots or paused sandboxes, or lower min_free_disk_mib",
            )
