"""Target features: layer convention, order, cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from training_models import tiny_target

from dflash_wire.errors import ConfigError
from drafter.training.capture import CachedFeatureSource, TargetTables, TransformersFeatureSource

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
LENGTHS = torch.tensor([4, 2])


def test_features_are_layer_outputs_in_list_order() -> None:
    target = tiny_target()
    features = TransformersFeatureSource(target, [3, 1]).features(IDS, LENGTHS)
    states = target(input_ids=IDS, output_hidden_states=True).hidden_states
    expected = torch.cat([states[4], states[2]], dim=-1)  # states[0] is the embedding
    torch.testing.assert_close(features, expected)


def test_hooks_do_not_outlive_a_call() -> None:
    target = tiny_target()
    source = TransformersFeatureSource(target, [1])
    source.features(IDS, LENGTHS)
    assert all(not layer._forward_hooks for layer in target.model.layers)
    assert target(input_ids=IDS).logits.shape == (2, 4, 64)  # the whole target runs again


def test_a_tap_outside_the_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside"):
        TransformersFeatureSource(tiny_target(), [1, 6]).features(IDS, LENGTHS)


def test_tables_are_the_targets_own() -> None:
    target = tiny_target()
    tables = TargetTables.of(target)
    assert tables.embedding.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert tables.lm_head.data_ptr() == target.lm_head.weight.data_ptr()


class CountingSource:
    """Counts the rows it computes; a feature is the token id."""

    def __init__(self) -> None:
        self.num_rows = 0

    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        self.num_rows += len(lengths)
        return input_ids[..., None].float()


def test_the_cache_computes_a_sequence_once_and_evicts_the_oldest() -> None:
    inner = CountingSource()
    source = CachedFeatureSource(inner, max_bytes=12)  # six tokens of one bf16 value
    first = source.features(IDS, LENGTHS)
    assert first[..., 0].tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    again = source.features(IDS.flip(0), LENGTHS.flip(0))
    assert torch.equal(again.flip(0), first)
    assert inner.num_rows == 2
    source.features(torch.tensor([[11]]), torch.tensor([1]))  # the first row leaves
    source.features(IDS[1:], LENGTHS[1:])
    assert inner.num_rows == 3
    source.features(IDS[:1], LENGTHS[:1])
    assert inner.num_rows == 4
