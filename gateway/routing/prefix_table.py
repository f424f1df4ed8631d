"""Who has seen which beginnings: a bounded memory that forgets what is old."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Group = TypeVar("Group", bound=Hashable)


class PrefixTable(Generic[Group]):
    """Prefix name -> the engine groups that computed it, and when.

    Owner: a ``GroupPicker``. It is a guess about caches elsewhere: a group that gave the pages up computes
    them again and has them then, so a wrong entry costs one detour and corrects itself.

    Args:
        max_names: names kept; the least recently used go first. A name takes some 350 bytes.
        ttl_s: entries that nobody used for so long are forgotten.

    Invariants: at most ``max_names`` names, each with at least one group.
    """

    def __init__(self, max_names: int, ttl_s: float) -> None:
        self._max_names = max_names
        self._ttl_s = ttl_s
        self._groups: OrderedDict[bytes, dict[Group, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, names: Iterable[bytes], group: Group, now: float) -> None:
        """Note that ``group`` has these beginnings from now on. Mutates."""
        for name in names:
            self._groups.setdefault(name, {})[group] = now
            self._groups.move_to_end(name)
        while len(self._groups) > self._max_names:
            self._groups.popitem(last=False)

    def depths(self, names: Sequence[bytes], now: float) -> dict[Group, int]:
        """Return how many of the names each group has, for those that have any. Does not mutate.

        Args:
            names: of one prompt, shortest beginning first.
            now: on the clock that ``add`` was given.
        """
        found: dict[Group, int] = {}
        for depth in range(len(names), 0, -1):
            for group, used_at in self._groups.get(names[depth - 1], {}).items():
                # A name stands for all before it, so the longest one decides.
                if group not in found and now - used_at <= self._ttl_s:
                    found[group] = depth
        return found

    def forget(self, group: Group) -> None:
        """A group is gone, and its caches with it. Mutates."""
        for name in list(self._groups):
            groups = self._groups[name]
            groups.pop(group, None)
            if not groups:
                del self._groups[name]
