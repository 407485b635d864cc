"""Secrets that the node makes for itself, under AENV_HOME/secrets: one line of text each, for its owner's eyes only."""

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aenv.errors import CorruptData, OperationFailed

_MAX_BYTES = 4096


def managed_secret(path: Path, *, generate: Callable[[], str], valid: Callable[[str], bool]) -> str:
    """The secret in `path`; made by `generate` when there is no such file.

    The file appears whole, durable and with mode 0600 or not at all; of two servers that make it at once both get the
    one that won. An existing file is never changed.

    Raises: CorruptData when what it holds is not `valid`, OperationFailed when others may read it or it cannot be
    read or made.
    """
    try:
        with suppress(FileNotFoundError):
            return _read(path, valid)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _create(path, generate())
        return _read(path, valid)
    except OSError as error:
        raise OperationFailed(f"secret {path}: {error.strerror}") from error


def _read(path: Path, valid: Callable[[str], bool]) -> str:
    # Not following links and not blocking: the check below is of the very file that is read.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OperationFailed(f"secret {path}: not a regular file")
        if status.st_mode & 0o077:
            raise OperationFailed(
                f"secret {path}: mode {stat.S_IMODE(status.st_mode):04o} lets others at it", hint=f"chmod 600 {path}"
            )
        if status.st_uid not in (0, os.geteuid()):
            raise OperationFailed(f"secret {path}: belongs to uid {status.st_uid}", hint=f"chown {os.geteuid()} {path}")
        text = os.read(descriptor, _MAX_BYTES).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
    if not valid(text):
        raise CorruptData(f"secret {path}: not what it should hold", hint="restore it, or remove it to get a new one")
    return text


def _create(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.write(descriptor, f"{text}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            os.link(staged, path)
    finally:
        staged.unlink()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
