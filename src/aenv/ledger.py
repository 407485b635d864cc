"""The resource ledger: what this node holds on the host, written before it is taken and erased after it is freed.

One small file an entry under AENV_RUNTIME/ledger, named `<kind>.<name>`, holding JSON. No fsync: everything named
here dies with a reboot anyway. After a crash the entries without an owner are what the start-up sweep frees. The
ledger never frees anything itself.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Entry:
    kind: str
    name: str
    owner: str
    """The sandbox (or other owner) the resource was taken for; "" when it is the node's own."""
    details: dict[str, Any]


class Ledger:
    """All calls are synchronous: one small file in a tmpfs each."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def _path(self, kind: str, name: str) -> Path:
        if "." in kind or "/" in kind or "/" in name:
            raise ValueError(f"ledger entry {kind!r}.{name!r}: kind without '.' or '/', name without '/'")
        return self._directory / f"{kind}.{name}"

    def record(self, kind: str, name: str, *, owner: str = "", **details: Any) -> None:
        """Write the entry; call it *before* taking the resource. Overwrites an entry of the same kind and name."""
        path = self._path(kind, name)
        staged = path.with_name(f".{path.name}")
        staged.write_text(json.dumps({"owner": owner, "details": details}))
        os.replace(staged, path)

    def erase(self, kind: str, name: str) -> None:
        """Forget the entry; call it *after* the resource is freed. An absent entry is fine."""
        self._path(kind, name).unlink(missing_ok=True)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Entries, of one kind or all, in name order. Unreadable ones are returned with empty details."""
        found = []
        for path in sorted(self._directory.iterdir()):
            if path.name.startswith("."):
                continue
            entry_kind, _, name = path.name.partition(".")
            if kind is not None and entry_kind != kind:
                continue
            try:
                content = json.loads(path.read_text())
            except (OSError, ValueError):
                content = {}
            found.append(Entry(entry_kind, name, content.get("owner", ""), content.get("details", {})))
        return found
