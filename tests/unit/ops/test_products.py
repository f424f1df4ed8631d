"""Products with packed weights: when they are taken, and that they compute what dense ones do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dflash_ops import products
from dflash_ops.products import (
    DenseProduct,
    HalfProduct,
    SummedProduct,
    half_products_work,
    half_scale,
    joint_product,
    product_of,
)

pytestmark = pytest.mark.unit

needs_half = pytest.mark.skipif(
    not half_products_work(), reason="this machine has no packed half-precision kernel"
)


def stored_weight(outputs: int, inputs: int, size: float = 0.05) -> Tensor:
    """Float32 values as they come out of a bfloat16 checkpoint, tiny ones included."""
    weight = torch.randn(outputs, inputs) * size
    weight[0, :3] = torch.tensor([1e-7, -3e-9, 0.0])
    return weight.bfloat16().float()


@needs_half
@pytest.mark.parametrize("size", [1e-4, 0.05, 20.0])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 65])
def test_packed_weights_give_float32_products(num_tokens: int, size: float) -> None:
    torch.manual_seed(num_tokens)
    weight, x = stored_weight(40, 24, size), torch.randn(num_tokens, 24)
    residual = torch.randn(num_tokens, 40)
    product = product_of(weight)
    assert isinstance(product, HalfProduct)
    exact = x.double() @ weight.double().t()
    bound = 1e-6 * float((x.double().abs() @ weight.double().abs().t()).max())
    assert float((product(x) - exact).abs().max()) <= bound
    scaled = product.of_scaled(x * product.input_scale)
    assert torch.equal(scaled, product(x))
    added = product.added_to(residual, x)
    assert float((added - (residual + exact)).abs().max()) <= bound + 1e-6


@needs_half
def test_a_row_does_not_depend_on_the_others() -> None:
    """What makes a token the same in every batch and at every draft block size."""
    torch.manual_seed(0)
    product, x = product_of(stored_weight(48, 32)), torch.randn(33, 32)
    together = product(x)
    for start, end in ((0, 1), (5, 6), (3, 11), (0, 16), (17, 33)):
        assert torch.equal(product(x[start:end]), together[start:end])


@needs_half
def test_values_that_half_precision_cannot_hold_stay_dense() -> None:
    torch.manual_seed(1)
    assert isinstance(product_of(torch.randn(8, 8)), DenseProduct), "24-bit mantissas"
    wide = torch.tensor([[3e4, 1.0 + 2**-7], [2**-30, 1.0]]) * torch.tensor([[1e6], [1.0]])
    assert isinstance(product_of(wide), DenseProduct), "more range than 16 bits have"
    assert isinstance(product_of(torch.zeros(4, 4)), DenseProduct)
    assert isinstance(product_of(torch.full((4, 4), torch.inf)), DenseProduct)


@needs_half
def test_biases_and_other_types_stay_dense() -> None:
    weight = stored_weight(8, 8)
    assert isinstance(product_of(weight, torch.zeros(8)), DenseProduct)
    assert isinstance(product_of(weight.bfloat16()), DenseProduct)


@needs_half
def test_without_the_kernel_everything_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "half_products_work", lambda: False)
    assert isinstance(product_of(stored_weight(8, 8)), DenseProduct)


def test_a_scale_is_a_power_of_two_that_fits() -> None:
    assert half_scale(torch.tensor([[0.75, -0.5]])) == 1.0
    tiny = torch.tensor([[3 * 2.0**-20, 5 * 2.0**-28]])
    scale = half_scale(tiny)
    assert scale is not None and scale > 1.0 and scale.hex().startswith("0x1.0")
    assert torch.equal((tiny * scale).half().float() / scale, tiny)
    assert half_scale(torch.tensor([[1.5 * 2**18]])) == 2.0**-3, "large values are scaled down"


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
@torch.inference_mode()
def test_joint_products_are_the_layers_side_by_side(has_bias: bool, is_stored: bool) -> None:
    torch.manual_seed(2)
    layers = [nn.Linear(6, n, bias=has_bias) for n in (3, 5)]
    if is_stored:
        for layer in layers:
            layer.weight.data = layer.weight.data.bfloat16().float()
    x, residual = torch.randn(4, 6), torch.randn(4, 8)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    weights = [layer.weight.detach().clone() for layer in layers]
    product = joint_product(layers)
    torch.testing.assert_close(product(x), expected)
    torch.testing.assert_close(product.of_scaled(x * product.input_scale), expected)
    torch.testing.assert_close(product.added_to(residual, x), residual + expected)
    if isinstance(product, DenseProduct):
        for layer, weight in zip(layers, weights, strict=True):
            assert torch.equal(linear(x, layer.weight, layer.bias), linear(x, weight, layer.bias))
            assert layer.weight.untyped_storage().data_ptr() == (
                layers[0].weight.untyped_storage().data_ptr()
            )
    else:
        assert all(layer.weight.numel() == 0 for layer in layers)


@pytest.mark.parametrize("size", [0.05, 20.0])
@torch.inference_mode()
def test_parts_add_up_to_the_whole(size: float) -> None:
    """Each process has some of the inputs; packed parts may have scales of their own."""
    torch.manual_seed(0)
    weight, bias = stored_weight(40, 24, size), torch.randn(40)
    x, residual = torch.randn(5, 24), torch.randn(5, 40)
    other = product_of(weight[:, 16:].contiguous())(x[:, 16:])
    # The bias is one process's, whose part is therefore dense.
    mine = SummedProduct(
        product_of(weight[:, :16].contiguous(), bias), lambda part: part.add_(other)
    )
    expected = linear(x, weight, bias)
    torch.testing.assert_close(mine(x[:, :16]), expected, atol=1e-4, rtol=1e-5)
    scaled = x[:, :16] * mine.input_scale
    torch.testing.assert_close(mine.of_scaled(scaled), expected, atol=1e-4, rtol=1e-5)
    added = mine.added_to(residual, x[:, :16])
    torch.testing.assert_close(added, residual + expected, atol=1e-4, rtol=1e-5)


def test_no_outputs_are_no_obstacle() -> None:
    """What a rank holds of a head that it does not need."""
    assert product_of(torch.empty(0, 24))(torch.randn(3, 24)).shape == (3, 0)
