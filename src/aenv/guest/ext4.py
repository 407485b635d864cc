"""An ext4 file system from a directory: equal trees make equal bytes, on any host and at any time."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from aenv.errors import OperationFailed
from aenv.guest.commands import run

_FEATURES = (
    *("has_journal", "ext_attr", "resize_inode", "dir_index", "filetype", "extent", "64bit", "flex_bg"),
    *("sparse_super", "large_file", "huge_file", "dir_nlink", "extra_isize", "metadata_csum"),
)
"""What every kernel since 3.18 reads."""
OPTIONS = (
    *("-t", "ext4", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0", "-J", "size=16"),
    *("-O", f"none,{','.join(_FEATURES)}", "-L", "root"),
)
"""4 KiB blocks, a 16 MiB journal, nothing kept back for root, one inode per 16 KiB."""
_NAMESPACE = uuid.UUID("6f6b1f5e-6d0f-5b0c-9d5c-2a4b8f1c7e10")


async def make_ext4(root: Path, image: Path, *, size_mib: int, identity: str, epoch: int) -> None:
    """Write what is below `root` into the new sparse file `image`; needs root for other users' files.

    Args:
        identity: decides UUID and directory hash seed.
        epoch: the file system's date of creation, and the times of access and change of all files, seconds.
            Times of modification are those of `root`.

    Raises: HostUnsupported without e2fsprogs, OperationFailed; `image` is then of no use.
    """
    name = str(uuid.uuid5(_NAMESPACE, identity))
    # Neither the host's configuration nor its clock decides what the image is.
    fixed = {"MKE2FS_CONFIG": str(image.with_name("no-mke2fs.conf")), "E2FSPROGS_FAKE_TIME": str(epoch)}
    # The inode tables are zeros already: saying so keeps the guest's kernel from writing them again.
    extended = f"hash_seed={name},lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0"
    options = (*OPTIONS, "-U", name, "-E", extended)
    # mke2fs allocates what it zeroes, even where the host can tell that it is zero: a copy has holes there.
    draft = image.with_suffix(".draft")
    await run("mke2fs", "-q", *options, "-d", root, draft, f"{size_mib}M", env=fixed)
    # -d copies when the files were read and changed on this host.
    commands = "".join(
        f"set_inode_field <{inode}> {field} @{epoch}\n"
        for inode in range(1, await _last_inode(draft) + 1)
        for field in ("atime", "ctime", "crtime")
    )
    await run("debugfs", "-w", "-f", "/dev/stdin", draft, env=fixed, stdin=commands.encode())
    await run("cp", "--sparse=always", draft, image)
    draft.unlink()


async def _last_inode(image: Path) -> int:
    """mke2fs gives inodes out in sequence, so it is the number of those in use."""
    header = (await run("dumpe2fs", "-h", image)).decode()
    found = re.search(r"^Inode count: +(\d+)$.*^Free inodes: +(\d+)$", header, re.MULTILINE | re.DOTALL)
    if found is None:
        raise OperationFailed(f"dumpe2fs does not say how many inodes {image} has")
    return int(found[1]) - int(found[2])
