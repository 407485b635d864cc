"""The initramfs: envd as /init, the kernel modules it loads, and nothing of the image that will run.

    /init             envd, a static program
    /modules/order    one file name a line: load them in this order
    /modules/*.ko
    /dev/console      so that PID 1 has standard streams before it mounts anything
    /dev /proc /sys /run /sysroot   mount points

The archive is uncompressed, because decompressing takes longer than copying, most of all under emulation. It
depends on nothing but its contents, so equal contents have equal bytes.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LAYOUT = 1
"""Part of the boot assets' key: raise it when the archive's layout changes."""

_ALIGNMENT = 512


@dataclass(frozen=True)
class Entry:
    """One inode of an archive, owned by root, dated to the epoch."""

    name: str
    """Without leading slash."""
    mode: int
    """Type and permission bits as in st_mode."""
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def contents(init: bytes, modules: Iterable[tuple[str, bytes]]) -> Iterator[Entry]:
    """What our initramfs holds; `modules` are (file name, bytes) in load order."""
    for name in ("dev", "modules", "proc", "run", "sys", "sysroot"):
        yield Entry(name, stat.S_IFDIR | 0o755)
    yield Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    yield Entry("init", stat.S_IFREG | 0o755, init)
    order = []
    for name, data in modules:
        yield Entry(f"modules/{name}", stat.S_IFREG | 0o644, data)
        order.append(name)
    yield Entry("modules/order", stat.S_IFREG | 0o644, "".join(f"{name}\n" for name in order).encode())


def write_archive(entries: Iterable[Entry]) -> bytes:
    """A cpio archive in the "newc" format, sorted by name so that directories come before what they hold.

    Source: Documentation/driver-api/early-userspace/buffer-format.rst.
    """
    archive = bytearray()
    for inode, entry in enumerate(sorted(entries, key=lambda entry: entry.name), start=1):
        _append(archive, inode, entry)
    _append(archive, 0, Entry("TRAILER!!!", 0))
    archive += bytes(-len(archive) % _ALIGNMENT)
    return bytes(archive)


def build_initramfs(path: Path, init: Path, modules: Iterable[Path]) -> None:
    """Write the initramfs with `init` as PID 1 and `modules` in load order."""
    loaded = ((module.name, module.read_bytes()) for module in modules)
    path.write_bytes(write_archive(contents(init.read_bytes(), loaded)))


def _append(archive: bytearray, inode: int, entry: Entry) -> None:
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    name = entry.name.encode() + b"\0"
    fields = [
        inode,
        entry.mode,
        0,  # uid
        0,  # gid
        links,
        0,  # mtime
        len(entry.data),
        0,  # device that holds the inode
        0,
        *entry.device,
        len(name),
        0,  # checksum, unused by newc
    ]
    archive += b"070701" + b"".join(b"%08x" % field for field in fields) + name
    archive += bytes(-len(archive) % 4)
    archive += entry.data
    archive += bytes(-len(archive) % 4)
