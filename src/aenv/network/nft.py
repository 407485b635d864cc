"""Runs `nft`: one child and one atomic transaction a call, in the namespace of the calling thread."""

import os
import shutil
import subprocess
from pathlib import Path

from aenv.errors import HostUnsupported, OperationFailed

_DEADLINE_S = 20.0


def find_nft(also: str = "/usr/sbin:/sbin") -> Path:
    """Looks in PATH and in `also`, which few users' PATH has. Raises: HostUnsupported when it is not there."""
    found = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:{also}")
    if found is None:
        raise HostUnsupported("no nft program found", hint="install the package nftables")
    return Path(found)


def apply(nft: Path, rules: str) -> None:
    """All of `rules` or none of it. Raises: OperationFailed with what nft said."""
    try:
        done = subprocess.run(
            [nft, "-f", "-"], input=rules, text=True, capture_output=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperationFailed(f"cannot run {nft}") from error
    if done.returncode != 0:
        raise OperationFailed(f"nft refused the rules: {done.stderr.strip()[:500]}")


def has_table(nft: Path, name: str) -> bool:
    """Whether the namespace has the inet table `name`. Raises: OperationFailed when nft cannot be run."""
    try:
        done = subprocess.run(
            [nft, "list", "tables", "inet"], text=True, capture_output=True, timeout=_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperationFailed(f"cannot run {nft}") from error
    return f"table inet {name}" in done.stdout.splitlines()
