"""Matrix products with frozen weights: half the weight traffic wherever that changes no value.

At a few tokens per pass a product is limited by reading its weights. Published checkpoints are stored in
16 bits, so a float32 copy of them carries no more information than they do: FBGEMM keeps such weights in
half precision, in tiles, widens them in registers and accumulates in float32. A matrix is kept that way
only when half precision holds every element (after scaling by a power of two) to within half a unit in
the last place that float32 has at the matrix's largest element; all others stay as they are.

A row of the result depends on nothing but that row, however many rows a pass has.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

LARGEST_HALF = 65504.0


class Product(Protocol):
    """``x @ weight.T + bias`` for ``x [T, inputs]``.

    Attributes:
        input_scale: a power of two. ``of_scaled`` wants its input multiplied by it, so that a caller
            can fold the factor into a norm's weight; it is 1 for most matrices.
    """

    input_scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, inputs]`` -> ``[T, outputs]``."""

    def of_scaled(self, x: Tensor) -> Tensor:
        """The same for an input that carries ``input_scale`` already."""

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual [T, outputs]`` plus the product."""


class DenseProduct:
    """A product with the weights as they are, on any device and in any type."""

    input_scale = 1.0

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Product``."""
        return linear(x, self._weight, self._bias)

    def of_scaled(self, x: Tensor) -> Tensor:
        """See ``Product``."""
        return linear(x, self._weight, self._bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Product``."""
        if self._bias is not None:
            residual = residual + self._bias
        return torch.addmm(residual, x, self._transposed)


class HalfProduct:
    """A float32 product on a CPU whose weights are packed in half precision."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        self._packed: Tensor = torch.fbgemm_pack_gemm_matrix_fp16((weight * scale).contiguous())
        self.input_scale = 1.0 / scale

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Product``."""
        return self.of_scaled(x if self.input_scale == 1.0 else x * self.input_scale)

    def of_scaled(self, x: Tensor) -> Tensor:
        """See ``Product``."""
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self._packed, None)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Product``."""
        return torch.add(residual, self.of_scaled(x), alpha=self.input_scale)


class SummedProduct:
    """A product whose inputs are spread over several processes: each has a part of the sum.

    Args:
        product: of this process's inputs with its part of the weights.
        summed: adds what all processes have up; may do so in place.
    """

    def __init__(self, product: Product, summed: Callable[[Tensor], Tensor]) -> None:
        self._product = product
        self._summed = summed
        self.input_scale = product.input_scale

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Product``."""
        return self._summed(self._product(x))

    def of_scaled(self, x: Tensor) -> Tensor:
        """See ``Product``."""
        return self._summed(self._product.of_scaled(x))

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Product``."""
        return residual + self._summed(self._product(x))


@cache
def half_products_work() -> bool:
    """Whether this machine and this torch have the packed kernel."""
    probe = torch.tensor([[1.0, 0.5], [-2.0, 3.0]])
    # Both operators warn, once per process, that they are deprecated in favour of one on the same kernel
    # that takes twice as long per call. The pinned torch has both; one without these gets dense products.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return torch.equal(HalfProduct(probe, 1.0)(probe), probe @ probe.t())
        except (AttributeError, RuntimeError):
            return False


def half_scale(weight: Tensor) -> float | None:
    """The power of two with which half precision holds ``weight``; None when none does.

    1 is preferred; any other one puts the largest element just below half precision's limit.
    """
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if not 0.0 < largest < math.inf:
        return None
    tolerance = largest * 2.0**-24
    widest = 2.0 ** math.floor(math.log2(LARGEST_HALF / largest))
    for scale in (1.0, widest):
        scaled = weight * scale
        if bool(((scaled.half().float() - scaled).abs() <= tolerance * scale).all()):
            return scale
    return None


def product_of(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The fastest product with these frozen weights.

    Args:
        weight: ``[outputs, inputs]``; kept or copied, never changed.
        bias: ``[outputs]`` or None.
    """
    is_candidate = bias is None and weight.dtype == torch.float32 and weight.device.type == "cpu"
    if is_candidate and half_products_work():
        scale = half_scale(weight)
        if scale is not None:
            return HalfProduct(weight, scale)
    return DenseProduct(weight, bias)


def joint_product(linears: Sequence[nn.Linear]) -> Product:
    """One product for layers that share their input; its outputs lie side by side.

    Mutates the layers, so that nothing is held twice: their weights become views of the joint one, or
    are dropped when it is packed.
    """
    weight = torch.cat([layer.weight.detach() for layer in linears])
    bias = None
    if any(layer.bias is not None for layer in linears):
        bias = torch.cat([layer.bias.detach() for layer in linears])
    product = product_of(weight, bias)
    if isinstance(product, HalfProduct):
        for layer in linears:
            layer.weight.data = weight.new_empty(0)
        return product
    start = 0
    for layer in linears:
        end = start + layer.weight.shape[0]
        layer.weight.data = weight[start:end]
        start = end
    return product
