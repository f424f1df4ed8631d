"""The output file: own rows are kept, a torn one is cut, anything else is left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dflash_wire.errors import ConfigError
from services import offline_output
from services.offline_output import encode_row, open_output, read_rows

pytestmark = pytest.mark.unit

ANSWER = encode_row({"id": "a", "text": "one\u2028two\u00e9", "finish_reason": "stop"})
ERROR = encode_row({"id": "e", "error": {"code": "invalid_value", "message": "no"}})


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def reopened(output: Path, retried: set[str]) -> bytes:
    with open_output(output, retried) as sink:
        sink.write(b"NEW")
    return output.read_bytes()


def test_rows_are_read_back(output: Path) -> None:
    output.write_bytes(ANSWER + b"\n" + ERROR)
    assert [(row.id, row.is_error) for row in read_rows(output)] == [("a", False), ("e", True)]


def test_missing_and_empty_files_have_no_rows(output: Path) -> None:
    assert read_rows(output) == []
    output.touch()
    assert read_rows(output) == []
    assert reopened(output, {"a"}) == b"NEW"


@pytest.mark.parametrize("length", range(1, len(ANSWER) - 1))
def test_torn_row_behind_whole_ones_is_cut(output: Path, length: int) -> None:
    output.write_bytes(ERROR + ANSWER[:length])
    assert [row.id for row in read_rows(output)] == ["e"]
    assert reopened(output, {"a"}) == ERROR + b"NEW"


def test_torn_first_row_is_cut(output: Path) -> None:
    output.write_bytes(ANSWER[:20])
    assert read_rows(output) == []
    assert reopened(output, {"a"}) == b"NEW"


def test_complete_row_that_lacks_its_newline_is_kept(output: Path) -> None:
    output.write_bytes(ERROR + ANSWER[:-1])
    assert [row.id for row in read_rows(output)] == ["e", "a"]
    assert reopened(output, set()) == ERROR + ANSWER + b"NEW"


def test_only_errors_that_are_tried_again_go(output: Path) -> None:
    other = encode_row({"id": "other", "error": {"code": "x", "message": "y"}})
    output.write_bytes(ERROR + ANSWER + other)
    assert reopened(output, {"e", "a"}) == ANSWER + other + b"NEW"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"precious notes without newline", 1),
        (b"precious notes\n", 1),
        (b"{", 1),
        (b'{"id": "a", "name": "somebody else\'s"}', 1),
        (b'{"id": "a", "prompt": "an input row"}\n', 1),
        (b'{"text": "no id"}\n', 1),
        (b'{"id": 3, "text": "x"}\n', 1),
        (b'["id"]\n', 1),
        (b'{"id": "n\xe9e", "text": "x"}\n', 1),
        (b"[" * 100_000, 1),
        (ANSWER + b"garbage\n" + ERROR, 2),
        (ANSWER + b"precious", 2),
        (ANSWER + b'{"id": "a"}', 2),
    ],
)
def test_foreign_content_is_refused_and_kept(output: Path, content: bytes, line: int) -> None:
    output.write_bytes(content)
    with pytest.raises(ConfigError, match="not a result of an offline batch") as caught:
        read_rows(output)
    assert str(caught.value).startswith(f"{output}:{line} ")
    with pytest.raises(ConfigError):
        open_output(output, {"a"})
    assert output.read_bytes() == content
    assert list(output.parent.iterdir()) == [output]


def test_half_a_surrogate_pair_is_written_as_valid_json() -> None:
    row = {"id": "a", "error": {"message": "got '\ud800' and \\ud800"}}
    line = encode_row(row)
    assert json.loads(line.decode("utf-8")) == row


def test_rewriting_keeps_links_and_permissions(output: Path) -> None:
    real = output.with_name("real.jsonl")
    real.write_bytes(ANSWER + ERROR)
    real.chmod(0o640)
    output.symlink_to(real)
    assert reopened(output, {"e"}) == ANSWER + b"NEW"
    assert output.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640


def test_failed_rewriting_changes_nothing(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(offline_output.os, "replace", fail)
    output.write_bytes(ANSWER + ERROR)
    with pytest.raises(OSError, match="Input/output"):
        open_output(output, {"e"})
    assert output.read_bytes() == ANSWER + ERROR
    assert os.listdir(output.parent) == [output.name]
