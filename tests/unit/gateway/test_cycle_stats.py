"""Statistics of a sequence fit its tokens, wherever and however it ends."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from gateway_fakes import FakeEngine, Item, cycle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_wire.records import GenerationRequest
from gateway.chat_tokenizer import ChatTokenizer
from gateway.generation import TextPiece, sequence_pieces
from gateway.metrics import GatewayMetrics
from gateway.state import GatewaySettings, GatewayState
from gateway.validation import SequencePlan

STOP_STRINGS = ["e", "th", "he q", "\ufffd", " ", "own f"]


def last_piece(state: GatewayState, plan: SequencePlan, metrics: GatewayMetrics) -> TextPiece:
    async def run() -> TextPiece:
        return [piece async for piece in sequence_pieces(state, plan, metrics, 0.0)][-1]

    return asyncio.run(run())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    token_ids=st.lists(st.integers(4, 329), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23), max_size=8),
    resampled=st.integers(0, 8),
    stops=st.lists(st.sampled_from(STOP_STRINGS), max_size=2),
    stop_ids=st.lists(st.integers(4, 329), max_size=3),
    reason=st.sampled_from(["length", "stop"]),
)
def test_cycles_and_prefills_make_up_all_tokens(
    token_ids: list[int],
    cuts: set[int],
    resampled: int,
    stops: list[str],
    stop_ids: list[int],
    reason: str,
    tokenizer: ChatTokenizer,
    settings: GatewaySettings,
) -> None:
    """Any cutting into cycles; the first token, and one after a preemption, come from prefills."""
    edges = [0, 1, *sorted(cut for cut in cuts if 1 < cut < len(token_ids)), len(token_ids)]
    spans = [span for span in pairwise(edges) if span[0] < span[1]]
    prefilled = {0, *([resampled] if spans[resampled : resampled + 1] else [])}
    prefilled = {i for i in prefilled if spans[i][1] - spans[i][0] == 1}
    script: list[Item] = []
    for i, (start, end) in enumerate(spans):
        chunk = cycle(token_ids[start:end], reason if end == len(token_ids) else None)
        chunk.cycle = None if i in prefilled else chunk.cycle
        script.append(chunk)
    request = GenerationRequest("r", [5], 99, stop_token_ids=stop_ids)
    state = GatewayState(FakeEngine(script), tokenizer, settings)
    metrics = GatewayMetrics()
    last = last_piece(state, SequencePlan(0, request, tuple(stops)), metrics)

    kept = [(i, min(end, last.num_tokens) - start) for i, (start, end) in enumerate(spans)]
    expected = [num for i, num in kept if num > 0 and i not in prefilled]
    num_prefill_tokens = sum(num for i, num in kept if num > 0 and i in prefilled)
    stats = last.stats
    assert stats is not None
    assert stats.committed_per_cycle == expected
    assert sum(stats.committed_per_cycle) + num_prefill_tokens == last.num_tokens
    assert stats.num_cycles == len(expected)
    # All but a cycle's last token are drafts; where the sequence was cut, that one is a draft too.
    is_cut = bool(expected) and last.num_tokens not in {end for _, end in spans}
    assert stats.num_accepted_drafts == sum(expected) - len(expected) + is_cut
    sample = metrics.registry.get_sample_value
    labels = {"drafter": "default"}
    assert sample("dflash_committed_tokens_total", labels) == sum(expected)
    assert sample("dflash_completion_tokens_total") == last.num_tokens
