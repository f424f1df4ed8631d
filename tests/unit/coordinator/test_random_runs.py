"""Random interleavings of submits, cancels, failures and steps on small engines."""

from __future__ import annotations

from dataclasses import replace

from coordinator_fakes import Bench, make_limits, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slot_book import SlotBook
from toy_target import DRAFTERS, plain_generation

from dflash_wire.drafters import DrafterLimits
from dflash_wire.errors import EngineUnavailableError
from dflash_wire.processors import Processors
from dflash_wire.records import GenerationRequest, StepPlan, StepResult

PENALTY = Processors(presence_penalty=1.0)
NAMES = ("default", "second", "third")


def fail(plan: StepPlan, result: StepResult) -> StepResult:
    raise EngineUnavailableError("lost")


class CoordinatorMachine(RuleBasedStateMachine):
    """Whatever happens, each request ends once and right, and every page comes back."""

    @initialize(
        drafters=st.lists(st.sampled_from(sorted(DRAFTERS)), min_size=1, max_size=3),
        num_pages=st.integers(6, 20),
        max_rows=st.integers(1, 5),
        max_step_positions=st.integers(8, 30),
        cohorts=st.sampled_from([(1,), (2,), (2,)]),
    )
    def build(
        self,
        drafters: list[str],
        num_pages: int,
        max_rows: int,
        max_step_positions: int,
        cohorts: tuple[int, ...],
    ) -> None:
        limits = make_limits(
            # Not all of a size: a request's width must be one of its own drafter's.
            drafters=tuple(
                DrafterLimits(NAMES[i], 8 - i, reads_tokens=i == 1) for i in range(len(drafters))
            ),
            num_pages=num_pages,
            page_size=3,
            max_rows=max_rows,
            max_step_positions=max_step_positions,
            max_context=min(40, num_pages * 3),
            max_draft_block_size=8,
        )
        self.bench = Bench(limits, tuple(DRAFTERS[name] for name in drafters), cohorts=cohorts)
        self.sent: list[GenerationRequest] = []
        self.bench.ring.on_run = SlotBook(max_rows, self.sent, self.bench.ring.violations)
        self.cancelled: dict[str, int] = {}
        self.num_requests = 0

    @rule(
        num_prompt=st.integers(1, 17),
        max_tokens=st.integers(1, 30),
        policy=st.sampled_from(
            [None, "off", "static:2", "static:5", "static:6", "static-tree:3", "static-tree:8"]
        ),
        num_stops=st.integers(0, 3),
        family=st.sampled_from([None, 0, 0, 1]),
        salt=st.sampled_from(["", "", "other"]),
        priority=st.integers(-1, 1),
        drafter=st.sampled_from([None, *NAMES]),
        processors=st.sampled_from(
            [None, None, PENALTY, Processors(biased_token_ids=[1], biases=[2.0])]
        ),
    )
    def submit(
        self,
        num_prompt: int,
        max_tokens: int,
        policy: str | None,
        num_stops: int,
        family: int | None,
        salt: str,
        priority: int,
        drafter: str | None,
        processors: Processors | None,
    ) -> None:
        i = self.num_requests
        stops = [(i * 31 + 17 * k) % 211 for k in range(10 * num_stops)]
        request = make_request(
            f"r{i}",
            num_prompt,
            max_tokens,
            i % 4,
            stops,
            policy,
            family,
            salt,
            priority,
            self._served(drafter),
        )
        # The toy target takes no notice of them: only their ways are looked at.
        self._submit(replace(request, processors=processors))

    @precondition(lambda self: self.num_requests > 0)
    @rule(
        data=st.data(),
        policy=st.sampled_from(["off", "static:5", "static-tree:7"]),
        drafter=st.sampled_from([None, *NAMES]),
    )
    def follow_up(self, data: st.DataObject, policy: str, drafter: str | None) -> None:
        """The next turn of a conversation: an earlier prompt, what came of it, and a little more."""
        earlier = f"r{data.draw(st.integers(0, self.num_requests - 1))}"
        request = self.bench.requests[earlier]
        prompt = [*request.prompt_token_ids, *self.bench.sink.tokens(earlier), 7, 8]
        if len(prompt) < self.bench.limits.max_context:
            self._submit(
                replace(
                    request,
                    request_id=f"r{self.num_requests}",
                    prompt_token_ids=prompt,
                    policy=policy,
                    drafter=self._served(drafter),
                )
            )

    def _served(self, drafter: str | None) -> str | None:
        names = {limits.name for limits in self.bench.limits.all_drafters}
        return drafter if drafter in names else None

    def _submit(self, request: GenerationRequest) -> None:
        self.num_requests += 1
        self.sent.append(request)
        self.bench.submit(request)

    @precondition(lambda self: self.num_requests > 0)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(0, self.num_requests - 1))}"
        if not self.bench.sink.has_ended(request_id) and request_id not in self.cancelled:
            self.cancelled[request_id] = len(self.bench.sink.chunks.get(request_id, []))
        self.bench.coordinator.cancel(request_id)

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.bench.step()

    @rule()
    def failing_step(self) -> None:
        self.bench.ring.sabotage = fail
        self.bench.step()
        self.bench.ring.sabotage = None

    @invariant()
    def pages_and_protocol_are_intact(self) -> None:
        if hasattr(self, "bench"):
            self.bench.coordinator.check_integrity()
            self.bench.check_protocol()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run_until_idle()
        self.bench.check_empty()
        for request_id, request in self.bench.requests.items():
            expected, _ = plain_generation(request, self.bench.limits.max_context)
            tokens = self.bench.sink.tokens(request_id)
            assert tokens == expected[: len(tokens)]
            if request_id in self.cancelled:
                num_chunks = len(self.bench.sink.chunks.get(request_id, []))
                assert num_chunks == self.cancelled[request_id]
            elif self.bench.sink.last(request_id).error is None:
                self.bench.check_finished(request_id)


CoordinatorMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRandomRuns = CoordinatorMachine.TestCase
