"""The root disk of the built-in template `base`: a small system of the host's own distribution, as ext4."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import CorruptData, HostUnsupported, StorageFull
from aenv.guest.cache import Progress, content_key, ensure_directory
from aenv.guest.commands import APT_HINT, run
from aenv.guest.ext4 import OPTIONS, make_ext4

PACKAGES = (
    *("bash", "ca-certificates", "coreutils", "curl", "git", "iproute2", "ncurses-bin", "procps", "sudo"),
    *("python-is-python3", "python3", "python3-pip", "python3-venv"),
)
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
_KEPT = ("/usr/share/doc/*/copyright",)
_FILES = {
    "etc/hostname": "sandbox\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
    "etc/machine-id": "",
    "etc/profile.d/path.sh": "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
    "etc/resolv.conf": "",
    "etc/sudoers.d/user": "user ALL=(ALL:ALL) NOPASSWD: ALL\n",
}
_TRACES = (
    "etc/*-",
    "tmp/*",
    "var/cache/apt/archives/*",
    "var/cache/ldconfig/*",
    "var/lib/apt/lists/*",
    "var/lib/dpkg/*-old",
    "var/log/*",
)
"""What the installation leaves that nobody needs; some of it differs each time."""
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_RECIPE = 1
_FREE_BYTES = 2 << 30
_IMAGE = "rootfs.ext4"
_META = "base.json"


@dataclass(frozen=True)
class BaseImage:
    """A root disk in the cache."""

    image: Path
    """Raw ext4, sparse."""
    size_bytes: int
    key: str
    """The same for the same recipe, package versions and size; then the bytes are the same too."""
    distribution: str


async def ensure_base_image(
    cache: Path, architecture: str, disk_mib: int, progress: Progress, *, refresh: bool = False
) -> BaseImage:
    """The cached image, built first when there is none; `refresh` builds it from today's packages.

    Raises: HostUnsupported without root, mmdebstrap or Debian sources in apt; StorageFull; OperationFailed;
        CorruptData for a damaged cache.
    """
    directory = base_directory(cache, architecture, disk_mib)

    async def build(work: Path) -> None:
        await _build(work, disk_mib, progress)

    await ensure_directory(directory, build, replace=refresh)
    try:
        meta = json.loads((directory / _META).read_text())
        image = directory / _IMAGE
        return BaseImage(image, image.stat().st_size, meta["key"], meta["distribution"])
    except (OSError, ValueError, KeyError) as error:
        raise CorruptData(f"{directory} is damaged", hint="remove it; it is built again") from error


def base_directory(cache: Path, architecture: str, disk_mib: int) -> Path:
    return cache / "base" / f"{architecture}-{content_key(*_recipe(disk_mib))}"


def _recipe(disk_mib: int) -> tuple[object, ...]:
    return _RECIPE, PACKAGES, _LEFT_OUT, _KEPT, _FILES, _TRACES, OPTIONS, disk_mib


async def _build(work: Path, disk_mib: int, progress: Progress) -> None:
    if os.geteuid() != 0:
        raise HostUnsupported("building the base image needs root", hint="run `sudo aenv assets build`")
    if shutil.disk_usage(work).free < _FREE_BYTES:
        raise StorageFull(f"building the base image needs {_FREE_BYTES >> 30} GiB below {work.parent}")
    suite, sources = await _host_sources()
    progress(f"base image: installing Debian {suite} (about a minute)")
    root = work / "root"
    await _install(root, suite, sources)
    await _configure(root)
    admin = f"--admindir={root}/var/lib/dpkg"
    shown = await run("dpkg-query", admin, "--show", "--showformat=${Package}=${Version}\n")
    packages = shown.decode().split()
    key = content_key(*_recipe(disk_mib), packages)
    progress("base image: making the file system")
    await make_ext4(root, work / _IMAGE, size_mib=disk_mib, identity=key, epoch=_settle_times(root))
    shutil.rmtree(root)
    meta = {"key": key, "distribution": f"debian-{suite}", "packages": packages}
    (work / _META).write_text(json.dumps(meta, indent=1) + "\n")


async def _host_sources() -> tuple[str, str]:
    """The host's Debian release, and its apt sources for it; what other vendors' sources offer stays out."""
    fields = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(COMPONENT)|$(SIGNED_BY)"
    listed = await run("apt-get", "indextargets", "--format", fields, "Created-By: Packages")
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    lines = []
    for target in dict.fromkeys(listed.decode().splitlines()):
        origin, release, uri, component, signed_by = target.split("|")
        if origin == "Debian" and release.startswith(suite):
            keyring = signed_by if signed_by.startswith("/") else _KEYRING
            lines.append(f"deb [signed-by={keyring}] {uri} {release} {component}\n")
    if not suite or not lines:
        raise HostUnsupported("apt knows no Debian sources of this host's release", hint=APT_HINT)
    return suite, "".join(lines)


async def _install(root: Path, suite: str, sources: str) -> None:
    filters = [
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
        *(f"--dpkgopt=path-include={pattern}" for pattern in _KEPT),
    ]
    await run(
        # It ends with us, its namespaces with it: nothing goes on writing, no mount stays behind.
        *(
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ),
        *("mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"),
        *(f"--include={','.join(PACKAGES)}", *filters, suite, str(root), "-"),
        env={"DEBIAN_FRONTEND": "noninteractive", "SOURCE_DATE_EPOCH": "0"},
        stdin=sources.encode(),
    )


async def _configure(root: Path) -> None:
    for name, text in _FILES.items():
        path = root / name
        path.unlink(missing_ok=True)  # a link here would lead to a file of the host
        path.write_text(text)
    (root / "etc/sudoers.d/user").chmod(0o440)
    await run(
        *("chroot", str(root), "useradd", "--uid", "1000", "--create-home", "--shell", "/bin/bash", "user"),
        env={"SOURCE_DATE_EPOCH": "0"},  # the date of the password
    )
    for pattern in _TRACES:
        for path in root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _settle_times(root: Path) -> int:
    """Date what the installation made like the newest packaged file, so that equal packages give equal times.

    Returns: that time, seconds since the epoch.
    """
    newest = max(path.lstat().st_mtime_ns for path in _packaged_files(root))
    for directory, names, files in os.walk(root):
        for name in [".", *names, *files]:
            path = Path(directory, name)
            if path.lstat().st_mtime_ns > newest:
                os.utime(path, ns=(newest, newest), follow_symlinks=False)
    return newest // 1_000_000_000


def _packaged_files(root: Path) -> Iterator[Path]:
    for sums in (root / "var/lib/dpkg/info").glob("*.md5sums"):
        for line in sums.read_text().splitlines():
            path = root / line.split(maxsplit=1)[1]
            if path.is_file() and not path.is_symlink():
                yield path
