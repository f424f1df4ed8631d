"""Converts our pair to llama.cpp's format: ``python gguf_convert.py SOURCE ARGUMENT...``.

Runs the ``convert_hf_to_gguf.py`` of llama.cpp's source tree in this interpreter. That script knows
tokenizers by a hash of what they make of one sentence, and so only published ones; ours is told by the
pattern in its ``tokenizer.json``, which is what the name in a GGUF file stands for.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
"""How text is split before byte pairs are merged -> llama.cpp's name for it."""
BYTE_LEVEL_OWN_PATTERN = "gpt-2"
"""llama.cpp's name for the pattern that ByteLevel has built in."""


def pre_tokenizer_name(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for the splitting in a ``tokenizer.json``.

    Raises:
        ValueError: llama.cpp has none that is known here.
    """
    own = tokenizer.get("pre_tokenizer") or {}
    steps = own.get("pretokenizers", [own])
    match [step.get("type") for step in steps]:
        case ["ByteLevel"] if steps[0].get("use_regex", True):
            return BYTE_LEVEL_OWN_PATTERN
        case ["Split", "ByteLevel"] if not steps[1].get("use_regex", True):
            pattern = steps[0]["pattern"].get("Regex")
            if pattern in PATTERNS and tokenizer.get("normalizer") is None:
                return PATTERNS[pattern]
    raise ValueError(f"no known name for this pre-tokenizer: {json.dumps(own)}")


def _named_by_pattern(converter: Any, _tokenizer: object) -> str:
    text = (Path(converter.dir_model) / "tokenizer.json").read_text(encoding="utf-8")
    return pre_tokenizer_name(json.loads(text))


def main() -> None:
    """Answer the converter's question and run it."""
    source, *arguments = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = _named_by_pattern
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
