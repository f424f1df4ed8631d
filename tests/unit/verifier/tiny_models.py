"""Random targets small enough for unit tests, saved as real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}
WINDOW = 6
SLIDING_FIRST = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILY_VALUES: dict[str, dict[str, Any]] = {
    "gemma3": {
        **SLIDING_FIRST,
        "query_pre_attn_scalar": 12,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
        },
    },
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_oss": {
        **SLIDING_FIRST,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
    },
}
"""What keeps a family's peculiarities alive at this size; ``layer_types`` repeat."""
HIDDEN = 32
HEAD_DIM = 8


def save_target(
    path: Path,
    family: str = "qwen3",
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 64,
    is_tied: bool = False,
    silent_token_id: int | None = None,
    seed: int = 0,
    **config_values: Any,
) -> Any:
    """Save a random float32 target.

    Args:
        path: folder to create.
        family: one of ``FAMILIES``.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        vocab_size: token ids.
        is_tied: whether the head is the embedding table.
        silent_token_id: an id that greedy decoding never yields, as a mask token must be.
        seed: of the weights.
        config_values: more keys of the config.

    Returns:
        transformers' own model with the same weights.
    """
    torch.manual_seed(seed)
    config_class, model_class = FAMILIES[family]
    values = {**FAMILY_VALUES.get(family, {}), **config_values}
    if "layer_types" in values:
        values["layer_types"] = (values["layer_types"] * num_layers)[:num_layers]
    config = config_class(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **values,
    )
    config._attn_implementation = "eager" if family == "gpt_oss" else "sdpa"
    model = model_class(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.normal_(0.0 if family == "gemma3" else 1.0, 0.2)
            elif name.endswith(("bias", "sinks")):
                value.normal_(0.0, 0.3)
            elif family == "gemma3" and "embed_tokens" in name:
                value.div_(HIDDEN**0.5)  # which the model multiplies by
        if silent_token_id is not None:
            # One of two opposite logits is positive, so a logit of zero is never the largest.
            head = model.lm_head.weight
            head[1] = -head[0]
            head[silent_token_id] = 0.0
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def generate_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The reference: transformers' own greedy ``generate``; returns the new tokens."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_pass(model: Any, token_ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """One dense pass of transformers.

    Returns:
        ``hidden_states`` (embedding first), each ``[T, H]``, and the cache's keys and values
        ``[L, T, 2, G, D]``.
    """
    output = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=True)
    layers = [
        torch.stack([layer.keys[0], layer.values[0]]).permute(2, 0, 1, 3)
        for layer in output.past_key_values.layers
    ]
    return [hidden[0] for hidden in output.hidden_states], torch.stack(layers)
