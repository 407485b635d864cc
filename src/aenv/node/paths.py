"""Where a node keeps what: durable things under AENV_HOME, what dies with a reboot under AENV_RUNTIME."""

from dataclasses import dataclass
from pathlib import Path

from aenv.settings import Settings


@dataclass(frozen=True)
class NodePaths:
    home: Path
    runtime: Path

    @classmethod
    def of(cls, settings: Settings) -> "NodePaths":
        return cls(settings.home.absolute(), settings.runtime.absolute())

    @property
    def database(self) -> Path:
        return self.home / "node.db"

    @property
    def layers(self) -> Path:
        return self.home / "layers"

    @property
    def states(self) -> Path:
        return self.home / "states"

    @property
    def uppers(self) -> Path:
        """Writable layers of running sandboxes, a directory each. On the file system of `layers`: sealing renames."""
        return self.home / "uppers"

    @property
    def secrets(self) -> Path:
        return self.home / "secrets"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def ledger(self) -> Path:
        return self.runtime / "ledger"

    @property
    def machines(self) -> Path:
        """Working directories of VMM processes, one each."""
        return self.runtime / "vm"

    @property
    def control_socket(self) -> Path:
        return self.runtime / "control.sock"
