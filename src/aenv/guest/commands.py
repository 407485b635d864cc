"""Host programs run to their end: output, failure with the tail of what they said, nothing left running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from aenv.errors import HostUnsupported, OperationFailed
from aenv.guest.host_packages import package_of, search_path

APT_HINT = "run `apt-get update`; if this is not Debian, copy the cache directory from a Debian machine"
"""What to do when apt does not know what a Debian host's apt knows."""
_ERROR_TAIL_BYTES = 2000


async def run(
    *argv: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    pass_fds: Sequence[int] = (),
) -> bytes:
    """Run a program and return its standard output; `env` is added to ours, messages are in the C locale.

    When the caller is cancelled the program's whole process group is killed and reaped first.

    Raises: HostUnsupported when the program is not installed, OperationFailed when it fails.
    """
    program = str(argv[0])
    environment = {**os.environ, "LC_ALL": "C", "PATH": search_path(), **(env or {})}
    try:
        process = await asyncio.create_subprocess_exec(
            *map(str, argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise HostUnsupported(
            f"{program} is not installed", hint=f"install the package {package_of(program)}"
        ) from error
    try:
        stdout, stderr = await process.communicate(stdin)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode != 0:
        said = (stderr or stdout)[-_ERROR_TAIL_BYTES:].decode(errors="replace").strip()
        raise OperationFailed(f"{program} ended with status {process.returncode}: {said or 'no output'}")
    return stdout
