"""The gateway over a scripted model that thinks and calls tools, on a port for clients of any language.

The embedded model knows neither; how its answers would be taken apart and sent does not depend on it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "gateway"))

from gateway_fakes import Item, cycle, last
from tool_models import HERMES, served_by, tool_tokenizer

from dflash_wire.errors import EngineUnavailableError
from dflash_wire.records import GenerationRequest
from drafter.training.demo.tokenizer import TURN_END
from gateway.state import GatewaySettings
from loadtest.processes import free_port

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
STEP_TOKENS = 5
"""Tokens of a cycle: calls and tags are cut anywhere."""


async def takes_anything(grammar: str) -> str | None:
    """The scripted model keeps to no grammar, so any will do."""
    return None


@contextmanager
def scripted_gateway() -> Iterator[str]:
    """Serve until the block ends; yields the base URL."""
    tokenizer = tool_tokenizer(HERMES)
    settings = GatewaySettings(
        model_id="demo/model",
        max_context=4000,
        vocab_size=len(tokenizer),
        eos_token_ids=(tokenizer.convert_tokens_to_ids(TURN_END),),
        max_draft_block_size=16,
        default_policy="static:8",
        version="1",
    )

    def script(request: GenerationRequest) -> list[Item]:
        prompt = tokenizer.decode(request.prompt_token_ids)
        turn = prompt.rpartition("<|im_start|>assistant")[0]
        if "<|im_start|>user\nbreak" in turn:
            text = tokenizer.encode("the fox", add_special_tokens=False)
            return [cycle(text), EngineUnavailableError("The engine went away.")]
        if "<|im_start|>tool\n" in turn:
            answer = "The sum is 3."
        else:
            answer = f"<think>\nthe fox\n</think>\n\nI add.\n{CALL}"
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        starts = range(0, len(tokens), STEP_TOKENS)
        return [*(cycle(tokens[i : i + STEP_TOKENS]) for i in starts), last([])]

    port = free_port()
    app = served_by(tokenizer, settings, script, takes_anything).app
    config = uvicorn.Config(app, port=port, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
