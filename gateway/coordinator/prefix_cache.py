"""Which pages hold a known beginning of a sequence, so that the next one that begins alike can share them.

A full page is named by a hash of its own tokens and of the page before it, so a name stands for a whole
prefix. Keys and values depend on the prefix alone; a page may have been used by any sequence before.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

_NAME_BYTES = 16


class PageNames:
    """Names of one sequence's full pages, computed as its tokens come.

    Owner: the sequence; the driver thread mutates it.

    Args:
        page_size: tokens per page.
        salt: sequences with different salts never share a page.
    """

    __slots__ = ("_names", "_page_size", "_root")

    def __init__(self, page_size: int, salt: str) -> None:
        self._page_size = page_size
        self._root = blake2b(salt.encode(), digest_size=_NAME_BYTES).digest()
        self._names: list[bytes] = []

    def of(self, token_ids: list[int], num_positions: int) -> list[bytes]:
        """Return the names of all pages that ``num_positions`` tokens fill.

        Args:
            token_ids: the sequence's tokens; those named before are unchanged.
            num_positions: at most ``len(token_ids)``.
        """
        size, names = self._page_size, self._names
        num_pages = num_positions // size
        for page in range(len(names), num_pages):
            parent = names[-1] if names else self._root
            tokens = array("I", token_ids[page * size : (page + 1) * size]).tobytes()
            names.append(blake2b(parent + tokens, digest_size=_NAME_BYTES).digest())
        return names[:num_pages]


class PrefixCache:
    """Names of pages, and the order in which pages that nobody holds are given up.

    Owner: the page allocator. A page with a name is *idle* while no table holds it. A name can stand for
    several pages: one with valid context of each drafter (its index), and one without any (None: a policy
    that never drafts keeps none).

    Invariants: a page has at most one name; idle pages have one.

    Args:
        num_drafters: drafters of the engine.
    """

    def __init__(self, num_drafters: int = 1) -> None:
        self._pages: dict[tuple[bytes, int | None], int] = {}
        self._names: dict[int, tuple[bytes, int | None]] = {}
        self._any_context: tuple[int | None, ...] = (*range(num_drafters), None)
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_idle(self) -> int:
        """Pages that nobody holds and that can be given up."""
        return len(self._idle)

    @property
    def idle_pages(self) -> list[int]:
        """Idle pages, the next to be given up first."""
        return list(self._idle)

    def knows(self, page_id: int) -> bool:
        """Whether the page has a name."""
        return page_id in self._names

    def match(self, names: Iterable[bytes], context: int | None) -> list[int]:
        """Return the pages of the longest known beginning of ``names``. Does not mutate.

        Args:
            names: from ``PageNames``.
            context: the drafter whose context the pages must have; None takes any page.
        """
        wanted = self._any_context if context is None else (context,)
        found: list[int] = []
        for name in names:
            for one in wanted:
                page_id = self._pages.get((name, one))
                if page_id is not None:
                    found.append(page_id)
                    break
            else:
                break
        return found

    def name_page(self, page_id: int, name: bytes, context: int | None) -> None:
        """Make a held page findable, unless it or its name is known already. Mutates."""
        key = (name, context)
        if page_id not in self._names and key not in self._pages:
            self._pages[key] = page_id
            self._names[page_id] = key

    def rest(self, page_id: int) -> None:
        """A page with a name lost its last holder: it is idle now. Mutates."""
        self._idle[page_id] = None

    def wake(self, page_id: int) -> None:
        """An idle page is held again. Mutates."""
        del self._idle[page_id]

    def give_up(self) -> int:
        """Forget the least recently used idle page and return it. Mutates."""
        page_id, _ = self._idle.popitem(last=False)
        del self._pages[self._names.pop(page_id)]
        return page_id

    def clear(self) -> list[int]:
        """Forget all names; return the pages that were idle. Mutates."""
        idle = list(self._idle)
        self._pages, self._names, self._idle = {}, {}, OrderedDict()
        return idle
