"""What detokenizing costs: ``python -m services.bench_detokenize`` prints one line of JSON.

Many sequences in turn, four tokens at a time, as a gateway gets them from steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from gateway.chat_tokenizer import ChatTokenizer
from gateway.detokenize import SequenceText
from services.spec import make_spec
from services.yaml_args import read_app_args

CHUNK_TOKENS = 4
TEXT = "Sara has 12 pens. She buys 3 boxes of 8 pens each, so she has 12 + 24 = 36 pens. "


def measure(tokenizer: ChatTokenizer, token_ids: list[int], num_sequences: int) -> float:
    """Return CPU milliseconds per 1,000 tokens."""
    texts = [SequenceText(tokenizer.new_detokenizer(), [], []) for _ in range(num_sequences)]
    began = time.thread_time()
    for start in range(0, len(token_ids), CHUNK_TOKENS):
        for text in texts:
            text.push(token_ids[start : start + CHUNK_TOKENS])
    return (time.thread_time() - began) * 1e6 / (len(token_ids) * num_sequences)


def main() -> None:
    """Measure twice and print the second, warm one."""
    parser = argparse.ArgumentParser(
        prog="python -m services.bench_detokenize", description=__doc__
    )
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="per sequence")
    options = parser.parse_args()
    tokenizer = ChatTokenizer.load(make_spec(read_app_args(options.config)).target_path)
    (piece,) = asyncio.run(tokenizer.encode_texts([TEXT]))
    token_ids = (piece * (options.tokens // len(piece) + 1))[: options.tokens]
    measure(tokenizer, token_ids, options.sequences)
    result = measure(tokenizer, token_ids, options.sequences)
    print(json.dumps({"ms_per_1000_tokens": round(result, 3)}))


if __name__ == "__main__":
    main()
