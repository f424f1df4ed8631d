"""The routing decision: which engine group should get a request."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from gateway.routing.group_load import GroupLoad
from gateway.routing.prefix_names import boundaries
from gateway.routing.prefix_table import PrefixTable

Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """How load and known prefixes are weighed."""

    page_size: int
    """Tokens per page of the engines."""
    prefix_weight: float = 8.0
    """Outstanding tokens that one cached prompt token outweighs."""
    load_bound_tokens: float = 4096
    """Outstanding tokens that a cached prefix outweighs at most, however long it is."""
    max_names: int = 65536
    ttl_s: float = 600.0


class GroupPicker(Generic[Group]):
    """Ranks engine groups for requests, and remembers what it sent where.

    Owner: one router; everything runs in its event loop. Groups come and go with ``keep``; one that is not
    kept is forgotten at once, prefixes and load.

    A group's *cost* is its outstanding tokens less ``prefix_weight`` tokens for each prompt token that it
    has cached and not every group has, at most ``load_bound_tokens``. The smallest cost wins; among equals
    the group that waited longest. So a prompt that nobody knows goes to the least loaded group, and a known
    one goes back to its group until that has ``load_bound_tokens`` more to do than another, or less for a
    short prefix: nobody should queue for the sake of a chat template's header.

    Args:
        rules: how to weigh.
        seed: of the order in which new groups take their first turn; None draws one.
    """

    def __init__(self, rules: RoutingRules, seed: int | None = None) -> None:
        self._rules = rules
        self._random = random.Random(seed)
        self._table: PrefixTable[Group] = PrefixTable(rules.max_names, rules.ttl_s)
        self._loads: dict[Group, GroupLoad] = {}
        self._turns: dict[Group, float] = {}
        self._num_turns = 0

    @property
    def num_names(self) -> int:
        """Prefix names that are known."""
        return len(self._table)

    def load_of(self, group: Group) -> GroupLoad:
        """The load of a kept group."""
        return self._loads[group]

    def keep(self, groups: Collection[Group]) -> None:
        """These groups exist now, no others. Mutates."""
        for group in [g for g in self._loads if g not in groups]:
            self.forget(group)
        for group in groups:
            self._loads.setdefault(group, GroupLoad())
            # By chance, or all gateways would begin with the same one.
            self._turns.setdefault(group, -self._random.random())

    def forget(self, group: Group) -> None:
        """A group is gone. Mutates; unknown ones are fine."""
        if self._loads.pop(group, None) is not None:
            self._table.forget(group)
        self._turns.pop(group, None)

    def rank(self, groups: Sequence[Group], names: Sequence[bytes], now: float) -> list[Group]:
        """Return the groups, best first. Does not mutate.

        Args:
            groups: who can take the request.
            names: of its prompt (see ``prefix_names``); none if nothing is known of it.
            now: seconds, on the clock of all calls here.
        """
        depths = self._table.depths(names, now) if names else {}
        sizes = [0, *islice(boundaries(), max(depths.values(), default=0))]
        # What all have, like a system prompt, must not use up the bound: it says nothing.
        least = min((sizes[depths.get(group, 0)] for group in groups), default=0)

        def cost(group: Group) -> tuple[float, float]:
            load = self._loads.get(group)
            num_cached = (sizes[depths.get(group, 0)] - least) * self._rules.page_size
            gain = min(num_cached * self._rules.prefix_weight, self._rules.load_bound_tokens)
            tokens = 0.0 if load is None else load.outstanding_tokens
            return tokens - gain, self._turns.get(group, 0)

        return sorted(groups, key=cost)

    def begin(
        self, group: Group, call_id: str, work: int, names: Sequence[bytes], now: float
    ) -> None:
        """A request goes to ``group``, which has its prompt's beginnings from then on. Mutates."""
        load = self._loads.get(group)
        if load is None:
            return
        load.begin(call_id, work, now)
        self._num_turns += 1
        self._turns[group] = self._num_turns
        self._table.add(names, group, now)

    def end(self, group: Group, call_id: str) -> None:
        """A request that was sent there has ended. Mutates; unknown ones are fine."""
        load = self._loads.get(group)
        if load is not None:
            load.end(call_id)

    def report(
        self, group: Group, outstanding_tokens: float, names: Sequence[bytes], now: float
    ) -> None:
        """Take in what a group says: its load and what others sent there of late. Mutates."""
        load = self._loads.get(group)
        if load is not None:
            load.report(outstanding_tokens, now)
            self._table.add(names, group, now)
