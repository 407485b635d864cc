"""The guest's kernel: the distribution's cloud kernel, as the plain ELF that VMMs start, and its modules."""

from __future__ import annotations

import json
import lzma
import re
import shutil
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import CorruptData, HostUnsupported, OperationFailed
from aenv.guest.cache import Progress, content_key, ensure_directory, file_digest
from aenv.guest.commands import APT_HINT, run

MODULES = (
    "virtio_mmio",
    "virtio_blk",
    "virtio_net",
    "virtio_balloon",
    "virtio_rng",
    "ext4",
)
"""Loaded before the root disk is mounted, each after what it depends on; those built in are left out."""

ARGUMENTS = "quiet panic=-1 mitigations=off cryptomgr.notests audit=0 8250.nr_uarts=1"
"""For the command line, on any VMM: a kernel that panics ends its VM, and one tenant needs no protection from itself.
All but the first takes a fifth off the processor time of an emulated boot, most by not testing cryptography."""

_RECIPE = 1
_META = "kernel.json"


@dataclass(frozen=True)
class Kernel:
    """A kernel in the cache."""

    image: Path
    """Uncompressed ELF."""
    modules: tuple[Path, ...]
    """Uncompressed, in load order."""
    release: str
    """As `uname -r` says in the guest."""
    package: str
    """Package and version it came from."""
    key: str
    """Content key of image and modules."""


async def ensure_kernel(cache: Path, architecture: str, progress: Progress, *, refresh: bool = False) -> Kernel:
    """The cached kernel, built first when there is none; `refresh` takes the newest package apt knows.

    Raises: HostUnsupported without the distribution's package; OperationFailed; CorruptData for an image we
        cannot read, or a damaged cache.
    """
    directory = kernel_directory(cache, architecture)

    async def build(work: Path) -> None:
        await _build(work, architecture, progress)

    await ensure_directory(directory, build, replace=refresh)
    return read_kernel(directory)


def kernel_directory(cache: Path, architecture: str) -> Path:
    return cache / "kernel" / f"{architecture}-{content_key(_RECIPE, MODULES)}"


def read_kernel(directory: Path) -> Kernel:
    """Raises: CorruptData when the cached directory was tampered with."""
    try:
        meta = json.loads((directory / _META).read_text())
        return Kernel(
            image=directory / "vmlinux",
            modules=tuple(directory / "modules" / name for name in meta["modules"]),
            release=meta["release"],
            package=meta["package"],
            key=meta["key"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise CorruptData(f"{directory} is damaged", hint="remove it; it is built again") from error


async def _build(work: Path, architecture: str, progress: Progress) -> None:
    if architecture != "x86_64":
        raise HostUnsupported(f"no guest kernel for {architecture}", hint="run on x86_64")
    package = await _newest_package("linux-image-cloud-amd64")
    progress(f"kernel: downloading {package}")
    scratch = work / "scratch"
    unpacked = scratch / "unpacked"
    unpacked.mkdir(parents=True)
    try:
        await run("apt-get", "download", "--quiet", package, cwd=scratch)
    except OperationFailed as error:
        raise OperationFailed(
            f"cannot download {package}", hint="run `apt-get update`; is the mirror reachable?"
        ) from error
    (archive,) = scratch.glob("*.deb")
    progress("kernel: extracting image and modules")
    await run("dpkg-deb", "--extract", archive, unpacked)

    (vmlinuz,) = (unpacked / "boot").glob("vmlinuz-*")
    release = vmlinuz.name.removeprefix("vmlinuz-")
    image = work / "vmlinux"
    image.write_bytes(await extract_elf(vmlinuz.read_bytes()))
    names = copy_modules(modules_root(unpacked) / release, MODULES, work / "modules")
    shutil.rmtree(scratch)

    key = content_key(file_digest(image), [(name, file_digest(work / "modules" / name)) for name in names])
    meta = {"modules": names, "release": release, "package": package, "key": key}
    (work / _META).write_text(json.dumps(meta, indent=1) + "\n")


def modules_root(unpacked: Path) -> Path:
    """Debian 13 packages hold /usr/lib only, older ones /lib."""
    merged = unpacked / "usr/lib/modules"
    return merged if merged.is_dir() else unpacked / "lib/modules"


async def _newest_package(meta_package: str) -> str:
    """The package that the meta package stands for, as apt's NAME=VERSION."""
    try:
        shown = (await run("apt-cache", "show", "--no-all-versions", meta_package)).decode()
    except (HostUnsupported, OperationFailed) as error:
        raise HostUnsupported(
            f"apt knows no package {meta_package}",
            hint=APT_HINT,
        ) from error
    found = re.search(r"^Depends:.*?\b(linux-image-[0-9][^ ,]*)(?: \(= ([^)]+)\))?", shown, re.MULTILINE)
    if found is None:
        raise HostUnsupported(
            f"{meta_package} depends on no kernel package", hint="AENV knows the kernels of Debian 12 and 13"
        )
    name, version = found.groups()
    return f"{name}={version}" if version else name


async def extract_elf(vmlinuz: bytes) -> bytes:
    """The ELF inside a bzImage (boot protocol 2.08 and later).

    Source: Documentation/arch/x86/boot.rst. Raises: CorruptData.
    """
    try:
        setup_sectors = vmlinuz[0x1F1] or 4
        (magic, protocol) = struct.unpack_from("<4sH", vmlinuz, 0x202)
        (offset, length) = struct.unpack_from("<II", vmlinuz, 0x248)
    except (struct.error, IndexError) as error:
        raise CorruptData("the kernel image is too short to be a bzImage") from error
    start = (setup_sectors + 1) * 512 + offset
    payload = vmlinuz[start : start + length]
    if magic != b"HdrS" or protocol < 0x0208 or len(payload) != length or length < 8:
        raise CorruptData("the kernel image is no bzImage of boot protocol 2.08 or later")
    elf = await _decompress(payload)
    if not elf.startswith(b"\x7fELF"):
        raise CorruptData("the kernel image's payload is no ELF file")
    return elf


async def _decompress(payload: bytes) -> bytes:
    # Every payload ends with the uncompressed size: gzip's own trailer, else appended by the kernel's build
    # and refused by the compressors' tools.
    body, (size,) = payload[:-4], struct.unpack("<I", payload[-4:])
    try:
        if payload.startswith(b"\x1f\x8b"):
            elf = zlib.decompressobj(wbits=31).decompress(payload)
        elif payload.startswith(b"\xfd7zXZ\0"):
            elf = lzma.decompress(body)
        elif payload.startswith(b"\x02\x21\x4c\x18"):
            elf = await run("lz4", "-d", "-c", stdin=body)
        elif payload.startswith(b"\x28\xb5\x2f\xfd"):
            elf = await run("zstd", "-d", "-c", stdin=body)
        else:
            raise CorruptData(f"the kernel image's compression is unknown (magic {payload[:4].hex()})")
    except (zlib.error, lzma.LZMAError, OperationFailed) as error:
        raise CorruptData("the kernel image's payload does not decompress") from error
    if len(elf) != size:
        raise CorruptData(f"the kernel image's payload has {len(elf)} bytes, its trailer says {size}")
    return elf


def copy_modules(source: Path, wanted: Iterable[str], target: Path) -> list[str]:
    """Copy the `wanted` modules and what they depend on, uncompressed; return the file names in load order."""
    available = {_module_name(path): path for path in source.rglob("*.ko*")}
    built_in = {_module_name(Path(line)) for line in (source / "modules.builtin").read_text().split()}
    target.mkdir()
    order: list[str] = []

    def add(name: str) -> None:
        file_name = f"{name}.ko"
        if name in built_in or file_name in order:
            return
        if name not in available:
            raise HostUnsupported(
                f"the kernel package has no module {name}", hint="AENV knows the kernels of Debian 12 and 13"
            )
        module = _read_module(available[name])
        for dependency in module_dependencies(module):
            add(dependency)
        (target / file_name).write_bytes(module)
        order.append(file_name)

    for name in wanted:
        add(name)
    return order


def _module_name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def _read_module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def module_dependencies(module: bytes) -> Iterable[str]:
    """Names of the modules that a module needs, from its .modinfo: the package holds no modules.dep.

    Raises: CorruptData.
    """
    found = re.search(rb"\0depends=([a-zA-Z0-9_,-]*)\0", module)
    if found is None:
        raise CorruptData("a kernel module carries no dependency list")
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name]
