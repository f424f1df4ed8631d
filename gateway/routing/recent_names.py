"""The prefixes that an engine group was asked for last, as it tells them to all routers."""

from __future__ import annotations

from collections import OrderedDict

from gateway.routing.prefix_names import split_names

MAX_NAMES = 512
"""4 KiB in a report: some twenty long prompts or a hundred short ones."""


class RecentNames:
    """The last ``MAX_NAMES`` prefix names of a group's requests.

    Owner: the coordinator deployment; its event loop mutates it. Gateways learn from it what other gateways
    sent where; each remembers for longer than this list does.

    Invariant: oldest first, each name once.
    """

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, names: bytes) -> None:
        """Note one request's names. Mutates."""
        for name in split_names(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def packed(self) -> bytes:
        """All of them in one string."""
        return b"".join(self._names)
