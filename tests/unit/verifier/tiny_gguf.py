"""A random Gemma 3 as a GGUF file, quantised as far as its shapes allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.constants import MODEL_ARCH
from gguf.quants import dequantize, quantize
from tiny_models import save_target
from torch import Tensor

NUM_LAYERS = 6
QUANTISED = GGMLQuantizationType.Q8_0
BLOCK_LENGTH = 32
"""Numbers that share a scale; rows must be whole blocks."""
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
TEXT = ["▁", "a", "b", "ab", "▁ab", "  "]
TOKENS = CONTROL + TEXT + [f"w{i}" for i in range(64 - len(CONTROL) - len(TEXT))]


def save_gguf(
    path: Path,
    architecture: str = "gemma3",
    leaves_out: str | None = None,
    chat_template: str | None = None,
) -> dict[str, Tensor]:
    """Write ``path`` for the model that a GGUF file can describe.

    Args:
        path: the file.
        architecture: what it says it is; its tensors are Gemma 3's in any case.
        leaves_out: a tensor that is missing in the file.
        chat_template: of its tokenizer, which has none otherwise.

    Returns:
        transformers' names and the float32 values that the file stands for.
    """
    model = save_target(
        path.with_suffix(".source"),
        "gemma3",
        num_layers=NUM_LAYERS,
        vocab_size=len(TOKENS),
        is_tied=True,
        # What the format has no keys for is what Gemma 3's config class says.
        query_pre_attn_scalar=256,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    writer = GGUFWriter(path, architecture)
    _write_config(writer, model.config)
    _write_tokenizer(writer)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    names = get_tensor_name_map(MODEL_ARCH.GEMMA3, NUM_LAYERS)
    expected = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # the embedding table
            continue
        value = tensor.numpy() + 1 if "norm" in name else tensor.numpy()
        is_quantised = value.shape[-1] % BLOCK_LENGTH == 0 and value.ndim == 2
        kind = QUANTISED if is_quantised else GGMLQuantizationType.F32
        stored = quantize(value, kind)
        read = torch.from_numpy(dequantize(stored, kind))
        expected[name] = read - 1 if "norm" in name else read
        if name != leaves_out:
            stem, _, suffix = name.rpartition(".")
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _write_config(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(config.sliding_window)


def _write_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    kinds = [TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in TOKENS]
    writer.add_token_types(kinds)
    writer.add_pad_token_id(CONTROL.index("<pad>"))
    writer.add_eos_token_id(CONTROL.index("<eos>"))
    writer.add_bos_token_id(CONTROL.index("<bos>"))
    writer.add_unk_token_id(CONTROL.index("<unk>"))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
