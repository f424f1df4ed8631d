from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_wire.errors import ConfigError, ContextLengthError, InvalidRequestError
from gateway import chat_tokenizer
from gateway.chat_tokenizer import ChatTokenizer

pytestmark = pytest.mark.asyncio

USER = [{"role": "user", "content": "the quick brown fox, 12 + 34 = 46\n"}]


async def test_a_saved_tokenizer_encodes_the_same(
    hf_tokenizer: PreTrainedTokenizerFast, tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    hf_tokenizer.save_pretrained(tmp_path)
    # The model's own config lies beside it and must not change how text is split.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    loaded = ChatTokenizer.load(tmp_path)
    token_ids = await loaded.encode_chat(USER)
    assert token_ids == await tokenizer.encode_chat(USER)
    detokenizer = loaded.new_detokenizer()
    text = "".join(detokenizer.push(token_id) for token_id in token_ids)
    assert text == "user\n" + USER[0]["content"] + "\nassistant\n"


async def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot load a tokenizer"):
        ChatTokenizer.load(tmp_path)


async def test_a_tokenizer_without_a_rust_backend() -> None:
    with pytest.raises(ConfigError, match="fast format"):
        ChatTokenizer(object())


async def test_no_template(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    plain = copy.deepcopy(hf_tokenizer)
    plain.chat_template = None
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        await ChatTokenizer(plain).encode_chat(USER)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}"]
)
async def test_a_template_that_refuses(
    hf_tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    strict = copy.deepcopy(hf_tokenizer)
    strict.chat_template = template
    with pytest.raises(InvalidRequestError, match="refuses these messages") as caught:
        await ChatTokenizer(strict).encode_chat(USER)
    assert caught.value.param == "messages"


async def test_long_text_leaves_the_event_loop_free(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    render = ChatTokenizer.render

    def spy(self: ChatTokenizer, messages: list[dict[str, str]], *options: object) -> str:
        threads.append(threading.current_thread().name)
        return render(self, messages, *options)

    monkeypatch.setattr(ChatTokenizer, "render", spy)
    await tokenizer.encode_chat(USER)
    long = [{"role": "user", "content": "x" * (chat_tokenizer.INLINE_CHARS + 1)}]
    await tokenizer.encode_chat(long)
    here = threading.current_thread().name
    assert threads[0] == here
    assert threads[1] != here


async def test_encoding_lets_the_event_loop_run(tokenizer: ChatTokenizer) -> None:
    """A thread is no use if the work in it keeps the interpreter to itself."""
    texts = ["".join(chr(97 + i * j % 26) for j in range(150_000)) for i in (3, 5, 7)]
    work = asyncio.ensure_future(tokenizer.encode_texts(texts))
    num_turns = 0
    while not work.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert sum(map(len, work.result())) > 100_000
    assert num_turns > 100


async def test_text_that_cannot_fit_is_refused_unread(tokenizer: ChatTokenizer) -> None:
    tokenizer.check_length(10, 10, "prompt")
    with pytest.raises(ContextLengthError, match="100000 characters") as caught:
        tokenizer.check_length(100_000, 10, "prompt")
    assert caught.value.param == "prompt"


async def test_threads_encode_alike(tokenizer: ChatTokenizer) -> None:
    texts = ["the quick brown fox " * 300 + str(i) for i in range(8)]
    together = await asyncio.gather(*(tokenizer.encode_texts([text]) for text in texts))
    one_by_one = [await tokenizer.encode_texts([text]) for text in texts]
    assert together == one_by_one


async def test_the_gateway_runs_without_torch(
    hf_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Importing it costs seconds and hundreds of megabytes per replica."""
    hf_tokenizer.save_pretrained(tmp_path)
    program = (
        "import asyncio, sys\n"
        "import gateway.app\n"
        "from gateway.chat_tokenizer import ChatTokenizer\n"
        f"tokenizer = ChatTokenizer.load({str(tmp_path)!r})\n"
        f"asyncio.run(tokenizer.encode_chat({USER!r}))\n"
        "print('torch' in sys.modules, 'ray' in sys.modules)\n"
    )
    root = Path(__file__).parents[3]
    path = f"{root}:{root / 'proto'}"
    output = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert output.stdout.strip() == "False False"
