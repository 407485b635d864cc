"""The nested VM's kernel: Debian's cloud kernel, 6.12 or later, with the modules tests need, in a cache outside the
checkout.
"""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import HostUnsupported, OperationFailed
from aenv.guest.cache import content_key, ensure_directory
from aenv.guest.commands import run
from aenv.guest.initramfs import contents, write_archive
from aenv.guest.kernel import copy_modules, modules_root

_OLDEST = (6, 12)
_META_PACKAGE = "linux-image-cloud-amd64"
_MIRROR = "http://deb.debian.org/debian"
_SUITES = ("bookworm-backports", "trixie")
"""Tried in order where apt's own sources have only an older kernel."""
MODULES = (
    *("virtio_blk", "virtio_net", "virtio_mmio", "virtio_balloon", "virtio_rng", "overlay", "kvm", "kvm_amd"),
    *("ublk_drv", "nbd", "loop", "xfs", "btrfs", "erofs", "tun", "veth", "bridge", "nf_tables", "nft_nat", "nft_masq"),
    *("nft_chain_nat", "nft_ct", "nft_connlimit", "nft_limit", "nft_reject_inet", "nft_reject", "nft_fib_inet"),
    *("nft_log", "nft_numgen", "nft_hash", "nft_quota"),
)
_INIT = Path(__file__).with_name("init.c")


@dataclass(frozen=True)
class NestedKernel:
    image: Path
    initramfs: Path
    release: str


async def ensure_kernel() -> NestedKernel:
    """Build it when the cache has none. Raises: HostUnsupported, OperationFailed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "aenv", "nested")
    directory = cache / content_key(MODULES, _INIT.read_text(), _SUITES)
    await ensure_directory(directory, _build)
    release = json.loads((directory / "kernel.json").read_text())["release"]
    return NestedKernel(directory / "vmlinuz", directory / "initramfs", release)


async def _build(work: Path) -> None:
    scratch = work / "scratch"
    unpacked = scratch / "unpacked"
    unpacked.mkdir(parents=True)
    (await _download(scratch)).rename(scratch / "kernel.deb")
    await run("dpkg-deb", "--extract", scratch / "kernel.deb", unpacked)
    (vmlinuz,) = (unpacked / "boot").glob("vmlinuz-*")
    release = vmlinuz.name.removeprefix("vmlinuz-")
    shutil.copy(vmlinuz, work / "vmlinuz")
    names = copy_modules(modules_root(unpacked) / release, MODULES, scratch / "modules")
    init = scratch / "init"
    await run("cc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", init, _INIT)
    files = ((name, (scratch / "modules" / name).read_bytes()) for name in names)
    (work / "initramfs").write_bytes(write_archive(contents(init.read_bytes(), files)))
    (work / "kernel.json").write_text(json.dumps({"release": release}))
    shutil.rmtree(scratch)


async def _download(scratch: Path) -> Path:
    """The package file of the newest kernel that is new enough."""
    for suite in (None, *_SUITES):
        options = [] if suite is None else await _private_lists(scratch / suite, suite)
        try:
            shown = (await run("apt-cache", *options, "show", "--no-all-versions", _META_PACKAGE)).decode()
        except OperationFailed:
            continue  # apt does not know it
        found = re.search(r"^Depends:.*?\b(linux-image-([0-9]+)\.([0-9]+)[^ ,]*)", shown, re.MULTILINE)
        if found is not None and (int(found[2]), int(found[3])) >= _OLDEST:
            await run("apt-get", *options, "download", "--quiet", found[1], cwd=scratch)
            (archive,) = scratch.glob("*.deb")
            return archive
    raise HostUnsupported("apt finds no cloud kernel of 6.12 or later", hint="run on Debian 12 or 13")


async def _private_lists(directory: Path, suite: str) -> list[str]:
    """Options by which apt sees this suite and nothing else, without a change to the host's own lists."""
    (directory / "lists" / "partial").mkdir(parents=True)
    sources = directory / "sources.list"
    sources.write_text(f"deb {_MIRROR} {suite} main\n")
    options = [
        *("-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=-"),
        *(
            "-o",
            f"Dir::State::lists={directory}/lists",
            "-o",
            "Dir::Cache::pkgcache=",
            "-o",
            "Dir::Cache::srcpkgcache=",
        ),
    ]
    await run("apt-get", *options, "update", "--quiet")
    return options


def supported() -> str:
    """Why the nested VM cannot run here; "" when it can."""
    for program in ("qemu-system-x86_64", "mke2fs", "cc", "apt-get"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if find_virtiofsd() is None:
        return "virtiofsd is not installed (Debian 12: qemu-system-common; Debian 13: virtiofsd)"
    if os.getuid() != 0:
        return "it needs root, to share the root file system"
    return ""


def find_virtiofsd() -> str | None:
    return next((path for path in ("/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd") if Path(path).exists()), None)


def qemu_numbers() -> tuple[int, ...]:
    """Major and minor version of QEMU."""
    output = subprocess.run(["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", output)
    return (int(found[1]), int(found[2])) if found else (0, 0)
