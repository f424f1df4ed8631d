from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path

import pytest

from gateway.chat_tokenizer import ChatTokenizer
from loadtest import prompt_sets
from loadtest.prompt_sets import CODE_REQUEST, load

pytestmark = pytest.mark.unit

COUNTS = {"word_problems": 100, "code_stubs": 50, "chat": 40, "long_inputs": 12}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_rows_are_well_formed_and_distinct(name: str, count: int) -> None:
    prompts = load(name)
    assert len(prompts) == count
    assert len({p.prompt_id for p in prompts}) == count
    assert len({p.messages[0]["content"] for p in prompts}) == count
    for prompt in prompts:
        (message,) = prompt.messages
        assert message["role"] == "user"
        assert message["content"] == message["content"].strip()


def test_word_problems_ask_for_a_number() -> None:
    for prompt in load("word_problems"):
        text = prompt.messages[0]["content"]
        assert text.endswith("?"), text
        assert any(c.isdigit() for c in text), text


def test_code_stubs_are_a_request_and_one_function() -> None:
    for prompt in load("code_stubs"):
        text = prompt.messages[0]["content"]
        assert text.startswith(CODE_REQUEST)
        (function,) = ast.parse(text.removeprefix(CODE_REQUEST)).body
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function) and len(function.body) == 1


def test_long_inputs_are_long() -> None:
    lengths = [len(p.messages[0]["content"].split()) for p in load("long_inputs")]
    assert min(lengths) >= 300 and max(lengths) <= 900


def test_names_join_and_limit() -> None:
    assert len(load("all")) == sum(COUNTS.values())
    both = load("chat, word_problems")
    assert (both[0].kind, both[-1].kind, len(both)) == ("chat", "word_problem", 140)
    mixed = load("mixed", limit=6)
    kinds = ["word_problem", "code_stub", "chat", "long_input", "word_problem", "code_stub"]
    assert [p.kind for p in mixed] == kinds


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(ValueError, match=r"'poems'.*word_problems"):
        load("poems")


def test_public_sets_come_from_the_named_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prompt_sets.DATA_VARIABLE, str(tmp_path))
    assert prompt_sets.available_sets() == list(COUNTS)
    with pytest.raises(ValueError, match="DFLASH_DATA"):
        load("gsm8k")

    rows = {
        "gsm8k_dev": {"question": "How many?", "answer": "2"},
        "humaneval": {"task_id": "HumanEval/0", "prompt": 'def f():\n    """Do."""\n'},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert prompt_sets.available_sets() == [*COUNTS, "gsm8k", "humaneval"]
    math, code = load("gsm8k,humaneval")
    assert math.messages[0]["content"] == "How many?"
    assert code.messages[0]["content"] == CODE_REQUEST + 'def f():\n    """Do."""'


def test_a_named_folder_that_is_missing_is_no_folder(tmp_path: Path) -> None:
    assert prompt_sets.data_folder({prompt_sets.DATA_VARIABLE: str(tmp_path / "none")}) is None


def test_every_prompt_fits_the_demo_pair() -> None:
    """A load run over our own sets has no failures of its own making."""
    tokenizer = ChatTokenizer.load(Path(__file__).parents[3] / "models" / "demo" / "target")
    for prompt in load("all"):
        token_ids = asyncio.run(tokenizer.encode_chat(prompt.messages))
        assert len(token_ids) <= 2048 - 128, prompt.prompt_id
