"""The least a capture of memory can be: the pages a stopped process has of its own, copied into a plain sparse file."""

import os
import re
from pathlib import Path

from aenv.vmm.contract import ProcessMemory

_PAGE = 4096
_PRESENT, _SWAPPED, _FILE_PAGE = 0x80, 0x40, 0x20
"""In the highest byte of an entry of /proc/PID/pagemap."""
_IS_OWN = bytes(int(bool(b & _SWAPPED or (b & _PRESENT and not b & _FILE_PAGE))) for b in range(256))
_RUN = re.compile(rb"\x01{1,256}")


def copy_dirty_pages(memory: ProcessMemory, target: Path) -> int:
    """Write the private pages of a suspended VM to their places in the new file `target`; returns how many. Closes the
    descriptors.
    """
    pages = 0
    try:
        with target.open("xb", buffering=0) as file:
            for part in memory.ranges:
                entries = os.pread(memory.pagemap_fd, part.length // _PAGE * 8, part.host_address // _PAGE * 8)
                for run in _RUN.finditer(entries[7::8].translate(_IS_OWN)):
                    offset, length = run.start() * _PAGE, (run.end() - run.start()) * _PAGE
                    data = os.pread(memory.mem_fd, length, part.host_address + offset)
                    os.pwrite(file.fileno(), data, part.guest_offset + offset)
                    pages += length // _PAGE
    finally:
        os.close(memory.mem_fd)
        os.close(memory.pagemap_fd)
    return pages
