"""What a node needs to run a guest: kernel, initramfs and base image, built here, kept in the cache.

    <cache>/kernel/ARCH-RECIPE/     the distribution's kernel: vmlinux, modules/
    <cache>/boot/ARCH-KEY/          one kernel with one envd: vmlinux, initramfs.cpio
    <cache>/base/ARCH-RECIPE/       root disk of the built-in template: rootfs.ext4

A kernel and a base image stay as they are until they are refreshed on purpose, so a node needs no network
once it has them. The boot assets follow envd. Everything here may be deleted while no build and no node runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import AenvError, CorruptData, HostUnsupported, OperationFailed
from aenv.guest.base_image import base_directory, ensure_base_image
from aenv.guest.cache import Progress, content_key, ensure_directory, file_digest
from aenv.guest.commands import run
from aenv.guest.initramfs import LAYOUT, build_initramfs
from aenv.guest.kernel import Kernel, ensure_kernel, kernel_directory
from aenv.settings import Settings

_KERNEL = "vmlinux"
_INITRAMFS = "initramfs.cpio"
_META = "boot.json"
_PT_INTERP = 3


@dataclass(frozen=True)
class Assets:
    """Paths in the cache, and keys that change when, and only when, the contents do."""

    architecture: str
    kernel: Path
    """Uncompressed ELF."""
    initramfs: Path
    boot_key: str
    """Of kernel and initramfs together."""
    kernel_version: str
    envd_version: str
    base_image: Path
    """Raw ext4 of `base_size_bytes`, sparse, read-only by convention."""
    base_size_bytes: int
    base_key: str
    """Of recipe, package versions and size."""


@dataclass(frozen=True)
class AssetStatus:
    name: str
    path: Path
    present: bool
    size_bytes: int
    """On disk, not counting holes."""


async def ensure_assets(settings: Settings, progress: Progress, *, refresh: bool = False) -> Assets:
    """Everything a guest needs, built where it is missing.

    Args:
        progress: called with lines for people, before each step that takes noticeable time.
        refresh: rebuild kernel and base image from today's packages.

    A second caller, in this process or another, waits for the first one's builds. A failure leaves the cache
    as it was.

    Raises: HostUnsupported with what to install or do; StorageFull; OperationFailed; CorruptData for a
        damaged cache.
    """
    architecture = platform.machine()
    kernel = await ensure_kernel(settings.cache, architecture, progress, refresh=refresh)
    boot = await _ensure_boot(settings.cache, architecture, kernel, progress)
    base = await ensure_base_image(settings.cache, architecture, settings.template_disk_mib, progress, refresh=refresh)
    return Assets(
        architecture=architecture,
        kernel=boot.directory / _KERNEL,
        initramfs=boot.directory / _INITRAMFS,
        boot_key=boot.key,
        kernel_version=kernel.release,
        envd_version=boot.envd_version,
        base_image=base.image,
        base_size_bytes=base.size_bytes,
        base_key=base.key,
    )


def asset_status(settings: Settings) -> list[AssetStatus]:
    """What is in the cache for these settings, without building anything or needing envd."""
    architecture = platform.machine()
    kernel = kernel_directory(settings.cache, architecture)
    boots = sorted((settings.cache / "boot").glob(f"{architecture}-*"), key=lambda path: path.stat().st_mtime)
    base = base_directory(settings.cache, architecture, settings.template_disk_mib)
    named = {"kernel": kernel, "boot": boots[-1] if boots else settings.cache / "boot", "base image": base}
    return [
        AssetStatus(name, path, path.is_dir() and (name != "boot" or bool(boots)), _disk_usage(path))
        for name, path in named.items()
    ]


@dataclass(frozen=True)
class _Boot:
    directory: Path
    key: str
    envd_version: str


async def _ensure_boot(cache: Path, architecture: str, kernel: Kernel, progress: Progress) -> _Boot:
    envd = find_envd()
    digest = await asyncio.to_thread(file_digest, envd)
    key = content_key(LAYOUT, kernel.key, digest)
    directory = cache / "boot" / f"{architecture}-{key}"

    async def build(work: Path) -> None:
        progress("initramfs: packing envd and modules")
        require_static(envd)
        version = (await run(envd, "--version")).decode().split()
        if not version:
            raise OperationFailed(f"`{envd} --version` says nothing")
        # A copy of its own: a refreshed kernel must not meet the modules of the one before.
        os.link(kernel.image, work / _KERNEL)
        await asyncio.to_thread(build_initramfs, work / _INITRAMFS, envd, kernel.modules)
        (work / _META).write_text(json.dumps({"envd_version": version[-1]}) + "\n")

    await ensure_directory(directory, build)
    try:
        return _Boot(directory, key, json.loads((directory / _META).read_text())["envd_version"])
    except (OSError, ValueError, KeyError) as error:
        raise CorruptData(f"{directory} is damaged", hint="remove it; it is built again") from error


def find_envd() -> Path:
    """The guest agent: AENV_ENVD (for work on envd itself), or the one of the aenv-native distribution.

    Raises: HostUnsupported when there is none.
    """
    if override := os.environ.get("AENV_ENVD"):
        return Path(override)
    try:
        from aenv_native import program  # noqa: PLC0415 (only servers have it)

        return program("envd")
    except (ImportError, FileNotFoundError) as error:
        raise HostUnsupported(
            "the guest agent envd is not installed", hint="run `make setup`, or install aenv[server]"
        ) from error


def require_static(program: Path) -> None:
    """Raises: HostUnsupported unless it is an ELF program that needs no dynamic loader: PID 1 has none."""
    data = program.read_bytes()
    try:
        (magic,) = struct.unpack_from("<4s", data)
        (table,) = struct.unpack_from("<Q", data, 32)
        entry_size, entries = struct.unpack_from("<HH", data, 54)
        kinds = [struct.unpack_from("<I", data, table + index * entry_size)[0] for index in range(entries)]
    except struct.error:
        magic, kinds = b"", []
    if magic != b"\x7fELF" or _PT_INTERP in kinds:
        raise HostUnsupported(f"{program} is not a static program", hint="build envd with `make setup`")


def _disk_usage(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def main() -> int:
    """`python -m aenv.guest.assets`: build what is missing and say where it is."""
    try:
        assets = asyncio.run(ensure_assets(Settings(), lambda line: print(line, flush=True)))
    except AenvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"kernel {assets.kernel_version}, envd {assets.envd_version}, base image {assets.base_image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
