"""The sealed layers of this node: where they are, and who holds them.

A layer lives as long as somebody holds it: a snapshot record, a sandbox, or a capture in progress. Holds are derived
state, in memory: at start every record takes its holds again and `sweep` removes what nobody held, so a crash at any
point leaves nothing behind and takes nothing away.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from aenv.ids import LayerId, new_layer_id

_SUFFIX = ".lsmt"


class LayerStore:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._holders: dict[str, frozenset[LayerId]] = {}
        self._counts: Counter[LayerId] = Counter()

    def path(self, layer: LayerId) -> Path:
        return self._directory / f"{layer}{_SUFFIX}"

    def paths(self, layers: Iterable[LayerId]) -> list[Path]:
        return [self.path(layer) for layer in layers]

    @staticmethod
    def layer_of(path: str | Path) -> LayerId:
        """The layer whose file `path` is."""
        return LayerId(Path(path).name.removesuffix(_SUFFIX))

    def new(self) -> LayerId:
        """A fresh name. Hold it before its file is made."""
        return new_layer_id()

    def hold(self, holder: str, layers: Iterable[LayerId]) -> None:
        """`holder` holds exactly `layers` from now on; what it alone held before and no longer does is removed."""
        wanted = frozenset(layers)
        held = self._holders.get(holder, frozenset())
        self._counts.update(wanted - held)
        self._holders[holder] = wanted
        self._drop(held - wanted)

    def release(self, holder: str) -> None:
        """`holder` holds nothing any more. Unknown holders are fine."""
        self._drop(self._holders.pop(holder, frozenset()))

    def sweep(self) -> list[LayerId]:
        """Remove the files that nobody holds, once all records have taken their holds. Returns what was removed."""
        removed = []
        for path in self._directory.glob(f"*{_SUFFIX}"):
            layer = self.layer_of(path)
            if not self._counts[layer]:
                path.unlink(missing_ok=True)
                removed.append(layer)
        return removed

    def _drop(self, layers: Iterable[LayerId]) -> None:
        for layer in layers:
            self._counts[layer] -= 1
            if self._counts[layer] <= 0:
                del self._counts[layer]
                self.path(layer).unlink(missing_ok=True)
