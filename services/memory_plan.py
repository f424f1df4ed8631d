"""What an executor will hold on its card, and whether that fits: sizes out of config files, no tensors.

Weights and pools are exact up to a loader's padding. Working memory is an estimate of what one pass over
``engine.max_step_positions`` positions holds at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_wire.errors import ConfigError

GIB = 2.0**30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXT_BYTES = 600 * 2**20
"""What CUDA itself and the libraries' workspaces take in every process."""
LOGIT_BYTES = 4 + 3 * 8
"""Of one token's score while it is sampled: a float32, and the noise of it in 64 bits."""


class Part(NamedTuple):
    """One thing that is held."""

    name: str
    num_bytes: int


class Sizes(NamedTuple):
    """What of the engine's settings memory depends on."""

    dtype: str
    num_pages: int
    page_size: int
    max_step_positions: int
    most_logits: int
    """Positions of a step that a token is chosen for."""
    graph_bytes: int

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one executor needs, or several on one card.

    Attributes:
        name: of it.
        fixed: everything but the pool.
        num_pages: of the pool.
        page_bytes: of one page, all layers together.
    """

    name: str
    fixed: tuple[Part, ...]
    num_pages: int
    page_bytes: int

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything, the pool included."""
        return *self.fixed, Part(f"{self.num_pages} pages", self.num_pages * self.page_bytes)

    @property
    def num_bytes(self) -> int:
        """Of everything."""
        return sum(part.num_bytes for part in self.parts)

    def most_pages(self, have_bytes: int) -> int:
        """Pages for which there is room beside the rest; negative when the rest is too much already."""
        return (have_bytes - sum(part.num_bytes for part in self.fixed)) // self.page_bytes

    def check(self, have_bytes: int, source: str) -> None:
        """Refuse what does not fit.

        Args:
            have_bytes: of the card.
            source: where that number comes from, for the message.

        Raises:
            ConfigError: with all sizes, and what to change.
        """
        if self.num_bytes <= have_bytes:
            return
        most = self.most_pages(have_bytes)
        advice = f"at most {most} pages (engine.num_pages) fit beside the rest"
        if most < 2:
            advice = (
                "no pages fit beside the rest: use a larger card, or several (docs/several-gpus.md)"
            )
        raise ConfigError(f"{self}, but {source} are {have_bytes / GIB:.2f} GiB; {advice}")

    def __str__(self) -> str:
        sizes = ", ".join(f"{part.name} {part.num_bytes / GIB:.2f}" for part in self.parts)
        return f"{self.name}: {self.num_bytes / GIB:.2f} GiB are needed ({sizes})"


def together(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """The plan of executors that share a card; their pools have the same pages."""
    if len(plans) == 1:
        return plans[0]
    fixed = [
        Part(f"{plan.name}'s {part.name}", part.num_bytes) for plan in plans for part in plan.fixed
    ]
    name = " and ".join(plan.name for plan in plans)
    pages = sum(plan.page_bytes for plan in plans)
    return MemoryPlan(name, tuple(fixed), plans[0].num_pages, pages)


def page_bytes(config: Mapping[str, Any], sizes: Sizes) -> int:
    """Keys and values of one page in all layers of a decoder with this ``config.json``."""
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    per_token = 2 * kv_heads * head_dim * int(config["num_hidden_layers"]) * sizes.item_bytes
    return per_token * sizes.page_size


def working_bytes(config: Mapping[str, Any], sizes: Sizes) -> int:
    """What the widest pass holds at the same time: a few hidden states, an MLP's inside, all layers' new keys
    and values twice, and logits."""
    hidden, inside = int(config["hidden_size"]), int(config.get("intermediate_size") or 0)
    step_kv = 2 * page_bytes(config, sizes) // sizes.page_size
    logits = int(config["vocab_size"]) * (sizes.item_bytes + LOGIT_BYTES)
    per_position = (6 * hidden + 3 * inside) * sizes.item_bytes + step_kv
    return sizes.max_step_positions * per_position + sizes.most_logits * logits


def plan_verifier(
    target: Mapping[str, Any], weight_bytes: int, feature_width: int, sizes: Sizes
) -> MemoryPlan:
    """What a verifier needs.

    Args:
        target: ``config.json``; of a rank of several, with its share of the heads.
        weight_bytes: of its tensors in the type they are served in.
        feature_width: elements of a row of the FeaturePool.
        sizes: of the engine.
    """
    features = 2 * sizes.max_step_positions * feature_width * sizes.item_bytes
    fixed = (
        Part("weights", weight_bytes),
        Part("features", features),
        Part("graphs at most", sizes.graph_bytes),
        Part("working memory about", working_bytes(target, sizes)),
        Part("CUDA about", CONTEXT_BYTES),
    )
    return MemoryPlan("verifier", fixed, sizes.num_pages, page_bytes(target, sizes))


def plan_drafter(
    drafter: Mapping[str, Any],
    vocab_size: int,
    weight_bytes: int,
    borrowed_bytes: int,
    num_lanes: int,
    sizes: Sizes,
) -> MemoryPlan:
    """What a drafter needs that has a model.

    Args:
        drafter: its ``config.json``, decoder keys at top level.
        vocab_size: of the target, which its logits have.
        weight_bytes: of its own tensors in the type they are served in.
        borrowed_bytes: of the target's embedding and head, which it holds too.
        num_lanes: verifiers that share it; each has as many pages.
        sizes: of the engine.
    """
    per_page = page_bytes(drafter, sizes)
    # Keys and values of all layers are projected by one matrix, beside those in the layers.
    joint = per_page // sizes.page_size * int(drafter["hidden_size"])
    fixed = (
        Part("weights", weight_bytes + joint),
        Part("the target's embedding and head", borrowed_bytes),
        Part("graphs at most", sizes.graph_bytes),
        Part("working memory about", working_bytes({**drafter, "vocab_size": vocab_size}, sizes)),
        Part("CUDA about", CONTEXT_BYTES),
    )
    return MemoryPlan("drafter", fixed, sizes.num_pages, per_page * num_lanes)
