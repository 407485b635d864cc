"""Which index the next slot tries. Pure, no I/O."""

from collections.abc import Collection

from aenv.errors import NoCapacity


class IndexSequence:
    """Indexes 1 to `last` in a circle, from `first`: an address freed now comes up again as late as possible.

    `first` should be random, so that nodes on one host seldom try the same index.
    """

    def __init__(self, first: int, last: int) -> None:
        self._next = first
        self._last = last

    def take(self, excluded: Collection[int]) -> int:
        """The next index not in `excluded`. Raises: NoCapacity when that leaves none."""
        for _ in range(self._last):
            index, self._next = self._next, self._next % self._last + 1
            if index not in excluded:
                return index
        raise NoCapacity(
            f"all {self._last} network slots of this host are in use",
            hint="delete sandboxes, or give AENV_HOST_INTERACTION_CIDR and AENV_VETH_CIDR larger ranges",
        )
