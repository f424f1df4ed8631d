"""Keeps book of the verifier's slots as plans use them."""

from __future__ import annotations

from dflash_wire.records import GenerationRequest, StepPlan


class SlotBook:
    """Checks that every slot is filled before it is used, by its own sequence and with all of its tokens.

    Args:
        max_rows: of the engine; more slots are not needed.
        requests: by the order in which they were submitted, which ``seq_id`` counts.
        violations: gets what is wrong.
    """

    def __init__(
        self, max_rows: int, requests: list[GenerationRequest], violations: list[str]
    ) -> None:
        self._max_rows = max_rows
        self._requests = requests
        self._violations = violations
        self._owners: dict[int, int] = {}
        self.num_fills = 0

    def __call__(self, plan: StepPlan) -> None:
        try:
            self._check(plan)
        except AssertionError as error:
            self._violations.append(f"step {plan.step_id}: {error}")

    def _check(self, plan: StepPlan) -> None:
        for row in plan.rows:
            request = self._requests[row.seq_id]
            slot = row.extras.slot if row.extras else None
            yields_tokens = row.samples or not row.is_prefill
            is_asked = request.processors is not None and yields_tokens
            assert (slot is not None) == is_asked, f"sequence {row.seq_id} has slot {slot}"
            if slot is None or row.extras is None or request.processors is None:
                continue
            assert 0 <= slot < self._max_rows, f"slot {slot}"
            start = row.extras.start
            assert (start is not None) == row.is_prefill
            if start is None:
                assert self._owners.get(slot) == row.seq_id, f"slot {slot} is another's"
                continue
            self._owners[slot] = row.seq_id
            self.num_fills += 1
            prompt = request.prompt_token_ids
            assert (start.processors, start.num_prompt) == (request.processors, len(prompt))
            if request.processors.reads_tokens:
                tokens = start.token_ids + row.token_ids
                assert tokens[: len(prompt)] == prompt, "another prompt"
                assert len(start.token_ids) == row.start_position, "tokens are missing"
            else:
                assert start.token_ids == []
