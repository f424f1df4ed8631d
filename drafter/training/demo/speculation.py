"""Reference speculative decoding for one request: plain transformers and the draft model.

It shares no code with the server, so its figures check training, export and semantics on their own.

Shape letters: B draft block size, L draft layers, G key/value heads, S context tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from drafter.model import DraftModel
from drafter.training.attention import make_block_context
from drafter.training.capture import TargetTables, tap_layers


@dataclass(frozen=True)
class Speculation:
    """Result of one request.

    Attributes:
        token_ids: the output, the end token included if it came.
        num_cycles: draft and verify rounds; the first token comes from the prompt's own pass.
    """

    token_ids: list[int]
    num_cycles: int

    @property
    def acceptance_length(self) -> float:
        """Mean committed tokens per cycle, bonus included."""
        return (len(self.token_ids) - 1) / max(1, self.num_cycles)


@torch.inference_mode()
def speculate(
    target: PreTrainedModel, model: DraftModel, prompt_ids: list[int], max_new_tokens: int
) -> Speculation:
    """Decode greedily with drafts.

    Args:
        target: float32, any attention that knows a cache.
        model: draft model with the training attention.
        prompt_ids: the prompt.
        max_new_tokens: limit.
    """
    tables = TargetTables.of(target)
    end_token_id = target.config.eos_token_id
    cache = DynamicCache(config=target.config)
    with tap_layers(target, model.target_layer_ids) as outputs:

        def run(token_ids: list[int]) -> tuple[list[int], Tensor]:
            """Target's choice after each token, and the features of the tokens."""
            # The cache goes by position: its keyword differs between versions of transformers.
            logits = target(torch.tensor([token_ids]), None, None, cache).logits
            features = torch.cat([outputs[i][0] for i in model.target_layer_ids], dim=-1)
            return logits[0].argmax(-1).tolist(), features

        choices, features = run(prompt_ids)
        committed = [*prompt_ids, choices[-1]]
        keys_values = _context(model, features, 0)
        num_cycles = 0
        while committed[-1] != end_token_id and len(committed) < len(prompt_ids) + max_new_tokens:
            anchor_position = len(committed) - 1
            drafts = _draft(model, tables, keys_values, committed[-1], anchor_position)
            choices, features = run([committed[-1], *drafts])
            num_accepted = 0
            while num_accepted < len(drafts) and drafts[num_accepted] == choices[num_accepted]:
                num_accepted += 1
            fresh = choices[: num_accepted + 1]
            if end_token_id in fresh:
                fresh = fresh[: fresh.index(end_token_id) + 1]
            committed += fresh[: len(prompt_ids) + max_new_tokens - len(committed)]
            num_rejected = len(drafts) - num_accepted
            if num_rejected > 0:
                cache.crop(-num_rejected)
            new = _context(model, features[: num_accepted + 1], anchor_position)
            keys_values = torch.cat([keys_values, new], dim=1)
            num_cycles += 1
    return Speculation(committed[len(prompt_ids) :], num_cycles)


def _context(model: DraftModel, features: Tensor, start: int) -> Tensor:
    """Draft keys and values ``[L, S, 2, G, D]`` of tokens from position ``start`` on."""
    positions = torch.arange(start, start + features.shape[0])
    return model.context_kv(model.project(features), positions)


def _draft(
    model: DraftModel, tables: TargetTables, keys_values: Tensor, anchor_id: int, position: int
) -> list[int]:
    """Draft B-1 tokens behind the anchor."""
    size = model.draft_block_size
    block_ids = torch.full((size,), model.mask_token_id)
    block_ids[0] = anchor_id
    rows, anchors = torch.zeros(1, dtype=torch.long), torch.tensor([position])
    hidden = model(
        functional.embedding(block_ids, tables.embedding)[None],
        torch.arange(position, position + size)[None],
        block_context=make_block_context(keys_values, 1, rows, anchors, size),
    )
    return functional.linear(hidden[0, 1:], tables.lm_head).argmax(-1).tolist()
