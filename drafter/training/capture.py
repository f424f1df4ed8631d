"""Where training gets target features from: a port, and its source inside transformers.

Feature l is the output of the target's 0-based decoder layer l; the tapped layers are concatenated
in list order on the last axis.

Shape letters: R rows, T tokens, K tapped layers, H target hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_wire.errors import ConfigError


class FeatureSource(Protocol):
    """Gives target features of token sequences."""

    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return features of right-padded rows.

        Args:
            input_ids: ``[R, T]`` int64.
            lengths: ``[R]`` int64; what stands behind a row's length is padding.

        Returns:
            ``[R, T, K*H]``; values at padding are unspecified.
        """
        ...


@dataclass(frozen=True)
class TargetTables:
    """The frozen parts of the target that a drafter borrows.

    Attributes:
        embedding: ``[V, H]`` raw rows, without any scale the target applies.
        lm_head: ``[V, H]``.
    """

    embedding: Tensor
    lm_head: Tensor

    @classmethod
    def of(cls, target: PreTrainedModel) -> TargetTables:
        """Take the tables of a loaded target; they share its memory."""
        embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        assert isinstance(embedding, nn.Embedding)
        assert isinstance(lm_head, nn.Linear)
        return cls(embedding.weight.detach(), lm_head.weight.detach())


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """Return the target's decoder layers.

    Raises:
        ConfigError: the architecture keeps them somewhere unknown.
    """
    layers = getattr(target.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ConfigError(f"cannot find the decoder layers of {type(target).__name__}")
    return layers


@contextmanager
def tap_layers(target: PreTrainedModel, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While open, every forward of ``target`` leaves the tapped layers' outputs in the yielded dict.

    Raises:
        ConfigError: a layer id is outside the target.
    """
    layers = decoder_layers(target)
    if not all(0 <= layer_id < len(layers) for layer_id in layer_ids):
        raise ConfigError(
            f"target_layer_ids {list(layer_ids)} outside the target's {len(layers)} layers"
        )
    outputs: dict[int, Tensor] = {}

    def hook(layer_id: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    handles = [layers[i].register_forward_hook(hook(i)) for i in set(layer_ids)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class _LastTapReached(Exception):
    """Ends a target forward whose remaining layers nobody reads."""


def _stop_forward(_module: nn.Module, _inputs: object, _output: object) -> None:
    raise _LastTapReached


class TransformersFeatureSource:
    """Computes features online with a frozen transformers model; implements ``FeatureSource``.

    Args:
        target: switched to evaluation mode and frozen.
        layer_ids: tapped layers, 0-based, in the order of concatenation.
        use_bf16: run the forward under bf16 autocast.
    """

    def __init__(
        self, target: PreTrainedModel, layer_ids: Sequence[int], use_bf16: bool = False
    ) -> None:
        self._target = target.eval().requires_grad_(False)
        self._layer_ids = list(layer_ids)
        self._use_bf16 = use_bf16

    @torch.no_grad()
    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Run the target up to its last tapped layer."""
        # Causal attention: a real token never reads the padding behind it, so no mask is needed.
        autocast = torch.autocast(input_ids.device.type, torch.bfloat16, enabled=self._use_bf16)
        with autocast, tap_layers(self._target, self._layer_ids) as outputs:
            last = decoder_layers(self._target)[max(self._layer_ids)]
            stop = last.register_forward_hook(_stop_forward)
            try:
                self._target.get_decoder()(input_ids=input_ids, use_cache=False)
            except _LastTapReached:
                pass
            finally:
                stop.remove()
        return torch.cat([outputs[i] for i in self._layer_ids], dim=-1)  # [R, T, K*H]


class CachedFeatureSource:
    """Keeps the features of sequences seen before in memory, in bf16; implements ``FeatureSource``.

    Owner of its cache. Oldest sequences leave first when ``max_bytes`` is reached. It returns bf16
    values whether they were kept or not, so a cache never changes a result.
    """

    def __init__(self, source: FeatureSource, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()

    def features(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Compute what is not kept yet, keep it, and return all rows."""
        sizes: list[int] = lengths.tolist()
        keys = [row[:n].cpu().numpy().tobytes() for row, n in zip(input_ids, sizes, strict=True)]
        missing = [i for i, key in enumerate(keys) if key not in self._rows]
        found = {key: self._rows[key] for key in keys if key in self._rows}
        if missing:
            longest = max(sizes[i] for i in missing)
            fresh = self._source.features(input_ids[missing, :longest], lengths[missing])
            for index, row in zip(missing, fresh.to(torch.bfloat16), strict=True):
                found[keys[index]] = row[: sizes[index]].clone()
                self._keep(keys[index], found[keys[index]])
        width = next(iter(found.values())).shape[-1]
        shape = (*input_ids.shape, width)
        out = torch.zeros(shape, dtype=torch.bfloat16, device=input_ids.device)  # [R, T, K*H]
        for index, key in enumerate(keys):
            out[index, : sizes[index]] = found[key]
        return out

    def _keep(self, key: bytes, row: Tensor) -> None:
        self._rows[key] = row
        self._num_bytes += row.numel() * row.element_size()
        while self._num_bytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._num_bytes -= oldest.numel() * oldest.element_size()
