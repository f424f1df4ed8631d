"""Simulated engine groups under chat traffic: what a routing rule does to cache hits and waiting times.

A group steps as the demo pair does on one CPU: 3 ms and 0.2 ms for each position, verify rows first, the rest
of the positions for prefill; pages are cached by whole prefix and given up in order of last use. Requests
come in conversations: a system prompt that all share, then turns that each repeat what was said before.

``PYTHONPATH=.:proto python tests/unit/routing/simulated_groups.py`` prints the table of docs/log.md.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.coordinator.outstanding import outstanding_tokens
from gateway.coordinator.prefix_cache import PageNames
from gateway.routing.group_picker import GroupPicker, RoutingRules
from gateway.routing.prefix_names import prefix_names, split_names
from gateway.routing.recent_names import RecentNames

PAGE = 16
STEP_POSITIONS = 512
ROW_POSITIONS, ROW_TOKENS = 4, 2.7
MAX_ROWS = 64
REPORT_PERIOD_S, REPORT_DELAY_S = 1.0, 0.2
EXPECTED_OUTPUT = 256


@dataclass
class Request:
    """One turn."""

    call_id: str
    prompt: list[int]
    num_output: int
    arrived_at: float
    conversation: Conversation
    num_to_prefill: int = 0
    num_cached: int = 0
    num_done: float = 0.0
    first_token_at: float | None = None


@dataclass
class Conversation:
    """A client that answers after it has read."""

    token_ids: list[int]
    num_turns: int
    gateway: int = 0


@dataclass
class Group:
    """One simulated engine group."""

    capacity_pages: int
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    recent: RecentNames = field(default_factory=RecentNames)
    is_stepping: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def outstanding(self) -> int:
        return sum(
            outstanding_tokens(
                r.num_to_prefill, max(0, int(r.num_output - r.num_done)), EXPECTED_OUTPUT
            )
            for r in itertools.chain(self.running, self.waiting)
        )

    def add(self, request: Request) -> None:
        request.num_to_prefill = len(request.prompt)
        self.waiting.append(request)

    def step(self) -> tuple[float, list[Request]]:
        """Return how long the step takes and who ends with it."""
        while self.waiting and len(self.running) < MAX_ROWS:
            self.running.append(self._admit(self.waiting.popleft()))
        positions, ended = 0, []
        for request in self.running:
            if request.num_to_prefill == 0:
                positions += ROW_POSITIONS
                request.num_done += ROW_TOKENS
                if request.num_done >= request.num_output:
                    ended.append(request)
        for request in self.running:
            chunk = min(request.num_to_prefill, STEP_POSITIONS - positions)
            request.num_to_prefill -= chunk
            positions += chunk
        self.running = [r for r in self.running if r not in ended]
        return 0.003 + 0.0002 * positions, ended

    def _admit(self, request: Request) -> Request:
        names = PageNames(PAGE, "").of(request.prompt, len(request.prompt) - 1)
        num_hits = next((i for i, name in enumerate(names) if name not in self.pages), len(names))
        for name in names:
            self.pages[name] = None
            self.pages.move_to_end(name)
        while len(self.pages) > self.capacity_pages:
            self.pages.popitem(last=False)
        request.num_cached = num_hits * PAGE
        request.num_to_prefill = len(request.prompt) - request.num_cached
        return request


@dataclass
class Outcome:
    """What a run gave."""

    cached_share: float
    first_token_p50_s: float
    first_token_p95_s: float
    seconds: float
    num_pages_peak: int

    def __str__(self) -> str:
        return (
            f"{self.cached_share:6.1%}  {1000 * self.first_token_p50_s:6.0f}  "
            f"{1000 * self.first_token_p95_s:6.0f}  {self.seconds:6.1f}"
        )


Choose = Callable[[list[Group], Request, int, float], int]


def by_requests(groups: list[Group], request: Request, gateway: int, now: float) -> int:
    """The fewest requests, known exactly: better than Serve's own router can be."""
    return min(range(len(groups)), key=lambda g: (groups[g].num_requests, random.random()))


class Simulation:
    """Conversations over several groups and gateways, with a picker in each gateway."""

    def __init__(
        self,
        rules: RoutingRules | None,
        num_groups: int = 4,
        num_gateways: int = 2,
        rate_per_s: float = 3.0,
        num_conversations: int = 200,
        capacity_pages: int = 2048,
        num_system_tokens: int = 200,
        seed: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        random.seed(seed)
        self.groups = [Group(capacity_pages) for _ in range(num_groups)]
        self.pickers = (
            [GroupPicker[int](rules, seed + gateway) for gateway in range(num_gateways)]
            if rules
            else []
        )
        for picker in self.pickers:
            picker.keep(range(num_groups))
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.now = 0.0
        self.done: list[Request] = []
        self.num_open = num_conversations
        system, at = self._tokens(num_system_tokens), 0.0
        for _ in range(num_conversations):
            at += self.rng.expovariate(rate_per_s)
            conversation = Conversation([*system], self.rng.randint(2, 6))
            self.at(at, lambda c=conversation: self._turn(c))  # type: ignore[misc]
        if self.pickers:
            self.at(REPORT_PERIOD_S, self._measure)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.counter), what))

    def _tokens(self, number: int) -> list[int]:
        return [self.rng.randrange(32000) for _ in range(number)]

    def _turn(self, conversation: Conversation) -> None:
        conversation.token_ids += self._tokens(self.rng.randint(20, 150))
        num_output = min(1 + int(self.rng.expovariate(1 / 120)), 500)
        prompt = conversation.token_ids.copy()
        call_id = str(next(self.counter))
        request = Request(call_id, prompt, num_output, self.now, conversation)
        conversation.gateway = gateway = self.rng.randrange(max(1, len(self.pickers)))
        group = self._route(request, gateway)
        self.groups[group].add(request)
        self._maybe_step(group)

    def _route(self, request: Request, gateway: int) -> int:
        if not self.pickers:
            return by_requests(self.groups, request, gateway, self.now)
        packed = prefix_names(request.prompt, "", PAGE)
        names, picker = split_names(packed), self.pickers[gateway]
        group = picker.rank(range(len(self.groups)), names, self.now)[0]
        work = outstanding_tokens(len(request.prompt), 2048, EXPECTED_OUTPUT)
        picker.begin(group, request.call_id, work, names, self.now)
        self.groups[group].recent.add(packed)
        return group

    def _maybe_step(self, index: int) -> None:
        group = self.groups[index]
        if group.is_stepping or not group.num_requests:
            return
        group.is_stepping = True
        duration, ended = group.step()
        self.at(self.now + duration, lambda: self._stepped(index, ended))

    def _stepped(self, index: int, ended: list[Request]) -> None:
        group = self.groups[index]
        group.is_stepping = False
        for request in itertools.chain(group.running, ended):
            if request.first_token_at is None and request.num_to_prefill == 0:
                request.first_token_at = self.now
        for request in ended:
            self._end(request, index)
        self._maybe_step(index)

    def _end(self, request: Request, index: int) -> None:
        self.done.append(request)
        conversation = request.conversation
        if self.pickers:
            self.pickers[conversation.gateway].end(index, request.call_id)
        conversation.token_ids += self._tokens(request.num_output)
        conversation.num_turns -= 1
        if conversation.num_turns and len(conversation.token_ids) < 1500:
            self.at(self.now + self.rng.expovariate(1 / 4.0), lambda: self._turn(conversation))
        else:
            self.num_open -= 1

    def _measure(self) -> None:
        for index, group in enumerate(self.groups):
            load, names = group.outstanding(), split_names(group.recent.packed())
            self.at(
                self.now + REPORT_DELAY_S,
                lambda i=index, tokens=load, n=names: self._report(i, tokens, n),  # type: ignore[misc]
            )
        if self.num_open:
            self.at(self.now + REPORT_PERIOD_S, self._measure)

    def _report(self, index: int, tokens: int, names: list[bytes]) -> None:
        for picker in self.pickers:
            picker.report(index, tokens, names, self.now)

    def run(self) -> Outcome:
        while self.events:
            self.now, _, what = heapq.heappop(self.events)
            what()
        waits = sorted((r.first_token_at or 0.0) - r.arrived_at for r in self.done)
        prompt_tokens = sum(len(r.prompt) for r in self.done)
        return Outcome(
            sum(r.num_cached for r in self.done) / prompt_tokens,
            waits[len(waits) // 2],
            waits[int(len(waits) * 0.95)],
            self.now,
            max(len(g.pages) for g in self.groups),
        )


def main() -> None:
    """Print the table."""
    rates = (2.0, 5.0, 11.0)
    print(f"{'rule':28}" + "".join(f"| {r:g} conv./s: cached p50 p95 ms  s   " for r in rates))
    rules: list[tuple[str, RoutingRules | None]] = [("fewest requests, exact", None)]
    for weight, bound in (
        *((0.0, 0.0), (1.0, 4096.0), (2.0, 4096.0), (4.0, 4096.0), (8.0, 4096.0), (16.0, 4096.0)),
        *((8.0, 1024.0), (8.0, 16384.0), (1000.0, 1e9)),
    ):
        rules.append((f"weight {weight:g}, bound {bound:g}", RoutingRules(PAGE, weight, bound)))
    for name, rule in rules:
        cells = []
        for rate in rates:
            runs = [Simulation(rule, rate_per_s=rate, seed=s).run() for s in range(3)]
            runs.sort(key=lambda outcome: outcome.first_token_p95_s)
            cells.append(str(runs[1]))
        print(f"{name:28}| " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
