"""What a checkpoint is, in words."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_ops.attention import Reach
from drafter.checkpoint.files import Checkpoint
from drafter.checkpoint.zlab import ARCHITECTURE_2, architecture_of
from drafter.eagle3.model import Eagle3Model
from drafter.model import DraftModel


def describe(checkpoint: Checkpoint, model: DraftModel) -> list[tuple[str, str]]:
    """Name and value of everything that decides how a drafter is served."""
    config, settings = model.config, model.settings
    is_second = architecture_of(checkpoint.values) == ARCHITECTURE_2
    numbers = sum(value.numel() for value in checkpoint.tensors.values())
    dtypes = sorted({str(v.dtype).removeprefix("torch.") for v in checkpoint.tensors.values()})
    depth = settings.num_target_layers
    rows = [
        ("layout", checkpoint.layout),
        ("kind", "DFlash 2" if is_second else "DFlash"),
        ("made for", str(checkpoint.values.get("verifier_name_or_path", "not said"))),
        ("numbers", f"{numbers:,} in {', '.join(dtypes)}"),
        ("layers", f"{config.num_hidden_layers} of hidden size {config.hidden_size}"),
        (
            "heads",
            f"{config.num_attention_heads} of size {config.head_dim}, {config.num_key_value_heads} key/value",
        ),
        ("attention", seen_by(settings.reaches)),
        ("rope", ", ".join(f"{k} {v}" for k, v in sorted((config.rope_parameters or {}).items()))),
        ("draft block", f"{settings.draft_block_size} positions, the anchor included"),
        ("mask token", str(settings.mask_token_id) + _mask(model)),
        ("tapped layers", f"{settings.target_layer_ids} of {depth or 'a target of unknown depth'}"),
        ("vocabulary", str(config.vocab_size)),
        ("head", _head(model)),
    ]
    if settings.embedding_scale != 1.0:
        rows.append(("embedding scale", f"{settings.embedding_scale:g}"))
    if settings.convolution is not None:
        sizes = settings.convolution
        rows.append(
            ("convolutions", f"{sizes.kernel_size} taps, {sizes.group_size} channels a group")
        )
    if settings.selector is not None:
        rows.append(
            ("selector", f"{settings.selector.top_k} candidates, rank {settings.selector.rank}")
        )
    return rows


def describe_eagle3(layout: str, model: Eagle3Model) -> list[tuple[str, str]]:
    """The same of an EAGLE-3 drafter."""
    config, settings = model.config, model.settings
    weights = list(model.parameters())
    norms = [
        name
        for is_there, name in (
            (settings.norm_before_fc, "of all features together"),
            (settings.has_feature_norms, "of each feature"),
            (settings.norm_before_residual, "in front of the residual"),
            (settings.norm_output, "of what the next token is drafted from"),
        )
        if is_there
    ]
    head = "its own" if settings.has_own_head else "the target's"
    if settings.draft_vocab_size is not None:
        head += f", {settings.draft_vocab_size} draft tokens"
    rope = sorted((config.rope_parameters or {}).items())
    depth = settings.num_target_layers
    return [
        ("layout", layout),
        ("kind", "EAGLE-3"),
        ("numbers", f"{sum(weight.numel() for weight in weights):,}"),
        ("layers", f"1 {config.model_type} layer of hidden size {config.hidden_size}"),
        (
            "heads",
            f"{config.num_attention_heads} of size {config.head_dim}, {config.num_key_value_heads} key/value",
        ),
        ("rope", ", ".join(f"{key} {value}" for key, value in rope)),
        ("further norms", "; ".join(norms) or "none"),
        ("tapped layers", f"{settings.target_layer_ids} of {depth or 'a target of unknown depth'}"),
        ("vocabulary", str(config.vocab_size)),
        ("embedding", "its own" if settings.has_own_embedding else "the target's"),
        ("head", head),
    ]


def seen_by(reaches: Sequence[Reach]) -> str:
    """What layers see, those that see the same together."""
    kinds: dict[Reach, list[str]] = {}
    for layer, reach in enumerate(reaches):
        kinds.setdefault(reach, []).append(str(layer))
    words = []
    for reach, layers in kinds.items():
        direction = "causal" if reach.is_causal else "both ways"
        extent = "everything" if reach.window is None else f"a window of {reach.window}"
        which = "all layers" if len(kinds) == 1 else f"layers {', '.join(layers)}"
        words.append(f"{which}: {extent}, {direction}")
    return "; ".join(words)


def _mask(model: DraftModel) -> str:
    return "" if model.mask_embedding is None else ", with an embedding of its own"


def _head(model: DraftModel) -> str:
    settings = model.settings
    words = ["its own" if settings.has_own_head else "the target's"]
    if settings.draft_vocab_size is not None:
        words.append(f"{settings.draft_vocab_size} draft tokens")
    if settings.output_multiplier != 1.0:
        words.append(f"logits times {settings.output_multiplier:g}")
    if settings.logit_softcap is not None:
        words.append(f"capped at {settings.logit_softcap:g}")
    return ", ".join(words)
