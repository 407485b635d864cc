"""Which programs of the distribution a node needs, and which package brings each: host-packages.txt."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class HostPackage:
    program: str
    package: str
    """As Debian calls it."""
    purpose: str

    @property
    def present(self) -> bool:
        return shutil.which(self.program, path=search_path()) is not None


def host_packages() -> Iterator[HostPackage]:
    for line in (files(__package__) / "host-packages.txt").read_text().splitlines():
        if not line.startswith("#"):
            yield HostPackage(*line.split(maxsplit=2))


def package_of(program: str) -> str:
    """The package that brings a program; by default one of the same name."""
    return next((known.package for known in host_packages() if known.program == program), program)


def search_path() -> str:
    """Where programs are looked for; users' PATHs leave out the directories of administrators' programs."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])
