"""What /proc tells of a VMM process: where its guest memory lies, and what it uses."""

import os
from collections.abc import Sequence
from pathlib import Path

from aenv.errors import OperationFailed, SandboxLost
from aenv.vmm.contract import MemoryRange, ProcessMemory, VmStats

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def open_memory(pid: int, inode: int, size: int) -> ProcessMemory:
    """Descriptors of the process's memory, and where the `size` bytes of the private mapping of file `inode`
    lie in it.

    The caller has stopped the process and closes the descriptors. Raises: SandboxLost when it is gone,
    OperationFailed when the mapping is not whole.
    """
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SandboxLost(f"memory of process {pid} cannot be opened") from error
    try:
        pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            ranges = mapped_ranges(Path(f"/proc/{pid}/maps").read_text(), inode)
            if sum(part.length for part in ranges) != size:
                raise OperationFailed(f"process {pid} maps {ranges} of its memory image, not {size} bytes")
        except BaseException:
            os.close(pagemap)
            raise
    except OSError as error:
        os.close(memory)
        raise SandboxLost(f"memory map of process {pid} cannot be read") from error
    except BaseException:
        os.close(memory)
        raise
    return ProcessMemory(mem_fd=memory, pagemap_fd=pagemap, ranges=ranges)


def mapped_ranges(maps: str, inode: int) -> Sequence[MemoryRange]:
    """Private, writable mappings of `inode` in the text of /proc/PID/maps, by offset in the file."""
    ranges = []
    for line in maps.splitlines():
        addresses, permissions, offset, _, mapped_inode = line.split(maxsplit=5)[:5]
        if int(mapped_inode) == inode and permissions.startswith("rw") and permissions[3] == "p":
            start, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append(MemoryRange(guest_offset=int(offset, 16), host_address=start, length=end - start))
    return sorted(ranges, key=lambda part: part.guest_offset)


def read_stats(pid: int) -> VmStats:
    """Raises: SandboxLost when the process is gone."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        # A private page of a file mapping counts as anonymous once written, which is what makes it this VM's
        # own.
        own = _kib(status["RssAnon"]) + _kib(status["VmSwap"])
        return VmStats((int(times[11]) + int(times[12])) / _TICKS_PER_S, _kib(status["VmRSS"]), own)
    except (OSError, KeyError) as error:
        raise SandboxLost(f"process {pid} is gone") from error


def _kib(field: str) -> int:
    return int(field.split(maxsplit=1)[0]) * 1024
