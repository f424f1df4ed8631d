"""A random EAGLE-3 drafter that fits a target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafter.checkpoint.eagle3 import default_taps
from drafter.eagle3.model import CONFIGS, Eagle3Model, Eagle3Settings


def save_random_eagle_for(target: Path, path: Path) -> None:
    """Write it in the public layout.

    Args:
        target: its folder.
        path: the folder to write.
    """
    of_target = json.loads((target / "config.json").read_text())
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": of_target["hidden_size"],
        "vocab_size": of_target["vocab_size"],
        "intermediate_size": of_target["intermediate_size"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": of_target["max_position_embeddings"],
    }
    torch.manual_seed(0)
    settings = Eagle3Settings(default_taps(of_target["num_hidden_layers"]))
    model = Eagle3Model(CONFIGS["llama"].from_dict(values), settings, 16)
    tensors = {
        name.replace("layer.", "midlayer.") if name.startswith("layer.") else name: value
        for name, value in model.state_dict().items()
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(values))
    save_file(tensors, path / "model.safetensors")
