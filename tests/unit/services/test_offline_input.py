"""Command line and prompt file of an offline batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_wire.errors import ConfigError, InvalidRequestError
from gateway.schemas import ChatCompletionBody, CompletionBody
from services.offline_answers import row_body
from services.offline_input import BatchItem, parse_arguments, read_items

pytestmark = pytest.mark.unit


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "hello"}\n')
    return path


def items_of(path: Path, content: str | bytes) -> list[BatchItem]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_items(path)


def test_three_kinds_of_rows(prompts: Path) -> None:
    rows = [
        {
            "id": "m",
            "messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}],
        },
        {"id": 7, "prompt": "p"},
        {"question": "q", "answer": "42"},
    ]
    content = "\n\n".join(json.dumps(row) for row in rows)
    items = items_of(prompts, content)
    assert [item.id for item in items] == ["m", "7", "line-5"]
    system, plain, question = (row_body(item.row, {"model": "m"}) for item in items)
    assert isinstance(system, ChatCompletionBody) and isinstance(question, ChatCompletionBody)
    assert [m.for_template() for m in system.messages] == [{"role": "system", "content": "x"}]
    assert isinstance(plain, CompletionBody) and plain.prompt == ["p"]
    assert [m.for_template() for m in question.messages] == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x7f"])
def test_only_a_newline_ends_a_line(prompts: Path, separator: str) -> None:
    row = json.dumps({"id": "a", "prompt": f"one{separator}two"}, ensure_ascii=False)
    items = items_of(prompts, f'{row}\r\n{{"id": "b", "prompt": "x"}}\r\n')
    assert [(item.id, item.row["prompt"]) for item in items] == [
        ("a", f"one{separator}two"),
        ("b", "x"),
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ('"messages": "hello"', "messages: "),
        ('"messages": []', "messages: "),
        ('"messages": [3]', "messages[0]: "),
        ('"messages": [{"role": "user"}]', "messages[0].content is required"),
        ('"messages": [{"role": "poet", "content": "x"}]', "messages[0].role: "),
        ('"messages": [{"role": "user", "content": 5}]', "messages[0].content: "),
        ('"messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]', "messages has half"),
        ('"messages": [{"role": "user", "content": "\\ud800"}]', "messages has half a surrog"),
        ('"messages": [{"role": "user", "content": "x", "name": "\\udfff"}]', "messages has half"),
        ('"prompt": 3', "prompt: "),
        ('"prompt": "a\\ud800b"', "prompt has half a surrogate pair"),
        ('"question": {"text": "x"}', "question: "),
        ('"question": "\\udc00"', "question has half a surrogate pair"),
        ('"kind": "empty"', "none of messages, prompt, question"),
    ],
)
def test_a_bad_row_is_refused_when_it_is_answered(prompts: Path, fields: str, words: str) -> None:
    good = '{"id": "good", "prompt": "x"}'
    bad, following = items_of(prompts, f'{{"id": "bad", {fields}}}\n{good}\n')
    assert bad.id == "bad"
    with pytest.raises(InvalidRequestError) as caught:
        row_body(bad.row, {"model": "m"})
    assert words in caught.value.message
    assert following.row["prompt"] == "x"


def test_a_whole_surrogate_pair_is_a_character(prompts: Path) -> None:
    (item,) = items_of(prompts, '{"id": "a", "prompt": "\\ud83d\\ude00"}')
    body = row_body(item.row, {"model": "m"})
    assert isinstance(body, CompletionBody) and body.prompt == ["\U0001f600"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"hello", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"id": ' + b"1" * 5000 + b', "prompt": "x"}', "is not JSON"),
        (b'["a"]', "is not a JSON object"),
        (b'{"id": "n\xe9e", "prompt": "x"}', "is not UTF-8"),
        (b'{"id": "\\ud800", "prompt": "x"}', "half a surrogate pair in its id"),
        (b'{"id": null, "prompt": "x"}', "neither a string nor an integer"),
        (b'{"id": true, "prompt": "x"}', "neither a string nor an integer"),
        (b'{"id": ["a"], "prompt": "x"}', "neither a string nor an integer"),
        (b'{"id": "a", "prompt": "x"}', "repeats the id 'a' of line 1"),
    ],
)
def test_row_without_usable_id_names_its_line(prompts: Path, line: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        items_of(prompts, b'{"id": "a", "prompt": "x"}\n\n' + line + b"\n")
    assert str(caught.value).startswith(f"{prompts}:3 ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "-5"),
        ("--max-tokens", "0"),
        ("--max-tokens", "many"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temperature", "-0.1"),
        ("--temperature", "2.1"),
        ("--top-k", "-3"),
        ("--top-k", "1.5"),
        ("--top-p", "7"),
        ("--top-p", "0"),
        ("--top-p", "nan"),
        ("--seed", "12345678901234567890"),
        ("--seed", "-1"),
        ("--concurrency", "0"),
        ("--concurrency", "1025"),
    ],
)
def test_option_out_of_range_is_refused(
    prompts: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--prompts", str(prompts), option, value])
    assert caught.value.code == 2
    assert f"argument {option}: must be a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", 1),
        ("--temperature", 2.0),
        ("--top-k", -1),
        ("--top-p", 1.0),
        ("--seed", 2**63 - 1),
        ("--concurrency", 1024),
    ],
)
def test_edge_of_a_range_is_fine(prompts: Path, option: str, value: float) -> None:
    options = parse_arguments(["--prompts", str(prompts), option, str(value)])
    assert getattr(options, option[2:].replace("-", "_")) == value


@pytest.mark.parametrize("output", ["missing/out.jsonl", ".", "x" * 300, "prompts.jsonl", "link"])
def test_impossible_output_is_refused(
    prompts: Path, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (prompts.parent / "link").symlink_to(prompts)
    before = prompts.read_bytes()
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--prompts", str(prompts), "--output", str(prompts.parent / output)])
    assert caught.value.code == 2
    assert "argument --output: " in capsys.readouterr().err
    assert prompts.read_bytes() == before


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_missing_prompts_are_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--prompts", str(tmp_path / name)])
    assert caught.value.code == 2
    assert "argument --prompts: " in capsys.readouterr().err


def test_checking_the_output_leaves_no_trace(prompts: Path) -> None:
    options = parse_arguments(["--prompts", str(prompts)])
    assert options.output == prompts.with_name("prompts.out.jsonl")
    assert sorted(prompts.parent.iterdir()) == [prompts]
