"""Reference loops for ``make bench``: ``python -m services.bench_reference {hf|dflash}``.

A long-lived worker that speaks JSON lines: a ready line first, then one reply per request line.
``hf`` is ``transformers``' ``generate``; ``dflash`` is the loop of the public ``dflash`` package on the
same weights. Request: ``{"prompt_token_ids", "max_tokens"}`` -> ``{"token_ids", "text", "seconds",
"acceptance_lengths"}``; or ``{"messages"}`` -> ``{"prompt_token_ids"}``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from gateway.chat_tokenizer import ChatTokenizer
from gateway.detokenize import SequenceText
from services.engines import torch_dtype
from services.settings import gateway_settings
from services.spec import EngineSpec, make_spec
from services.yaml_args import read_app_args

Loop = Callable[[list[int], int], tuple[list[int], list[int] | None]]


def _target(spec: EngineSpec) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        spec.target_path, dtype=torch_dtype(spec), attn_implementation="sdpa"
    )
    return model.eval()


def hf_loop(spec: EngineSpec, eos: list[int]) -> Loop:
    """Greedy ``generate`` of transformers."""
    model = _target(spec)

    def run(prompt: list[int], max_tokens: int) -> tuple[list[int], None]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=eos,
                temperature=None,
                top_p=None,
                top_k=None,
            )
        return output[0, len(prompt) :].tolist(), None

    return run


def dflash_loop(spec: EngineSpec, eos: list[int]) -> Loop:
    """Greedy loop of the public package at the drafter's own draft block size."""
    from dflash import model as reference
    from safetensors.torch import load_file

    # The package times with CUDA events; on CPU the wall clock is the same thing.
    reference._cuda_time = time.perf_counter
    target = _target(spec)
    folder = Path(spec.drafter_path)
    config = Qwen3Config.from_dict(json.loads((folder / "config.json").read_text()))
    drafter = reference.DFlashDraftModel(config)
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    drafter = drafter.to(torch_dtype(spec)).eval()

    def run(prompt: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
        output = reference.dflash_generate(
            drafter, target, torch.tensor([prompt]), max_tokens, eos, return_stats=True
        )
        return output.output_ids[0, len(prompt) :].tolist(), list(output.acceptance_lengths)

    return run


def text_of(tokenizer: ChatTokenizer, token_ids: list[int], eos: list[int]) -> str:
    """Decode as the gateway does, so that texts can be compared."""
    output = SequenceText(tokenizer.new_detokenizer(), [], eos)
    return output.push(token_ids) + output.finish("length")


def serve_lines(loop: Loop, tokenizer: ChatTokenizer, eos: list[int]) -> None:
    """Answer request lines until stdin ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "messages" in request:
            prompt = asyncio.run(tokenizer.encode_chat(request["messages"]))
            print(json.dumps({"prompt_token_ids": prompt}), flush=True)
            continue
        began = time.perf_counter()
        token_ids, lengths = loop(request["prompt_token_ids"], request["max_tokens"])
        seconds = time.perf_counter() - began
        reply = {
            "token_ids": token_ids,
            "text": text_of(tokenizer, token_ids, eos),
            "seconds": seconds,
            "acceptance_lengths": lengths,
        }
        print(json.dumps(reply), flush=True)


def main() -> None:
    """Load one reference and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loop", choices=["hf", "dflash"])
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument("--threads", type=int, help="torch threads; default as the verifier's")
    options = parser.parse_args()
    args = read_app_args(options.config)
    torch.set_num_threads(options.threads or args.verifier.num_threads)
    spec = make_spec(args)
    eos = list(gateway_settings(args, spec).eos_token_ids)
    make = {"hf": hf_loop, "dflash": dflash_loop}[options.loop]
    serve_lines(make(spec, eos), ChatTokenizer.load(spec.target_path), eos)


if __name__ == "__main__":
    main()
