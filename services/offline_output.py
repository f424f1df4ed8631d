"""Output of an offline batch: a file of JSON lines that only ever holds this tool's own rows.

A row is ``{"id": ..., "text": ...}`` or ``{"id": ..., "error": ...}`` with more fields behind. A file
with anything else in it belongs to somebody else and is never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from dflash_wire.errors import ConfigError

_ROW_START = b'{"id": "'


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One complete line that an earlier run wrote."""

    id: str
    is_error: bool
    line: bytes


def encode_row(row: dict[str, Any]) -> bytes:
    """Return ``row`` as one line. Its first key must be ``id``."""
    # An error may quote half a surrogate pair; written as \udXXX it is valid JSON again.
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def read_rows(path: Path) -> list[OutputRow]:
    """Read the complete rows of ``path``; what a killed run left of its last one is left out.

    Raises:
        ConfigError: the file cannot be read, or holds something that this tool did not write.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    *lines, tail = data.split(b"\n")
    rows: list[OutputRow] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_parse_row(line) or _refuse(path, number))
    if not tail.strip():
        return rows
    row = _parse_row(tail)
    if row is not None:
        rows.append(row)
    elif not _is_torn_row(tail, follows_rows=bool(rows)):
        _refuse(path, len(lines) + 1)
    return rows


def check_writable(path: Path) -> None:
    """Check that ``path`` can be appended to, without changing it or leaving it behind.

    Raises:
        OSError: it cannot.
    """
    if path.exists():
        path.open("ab").close()
    else:
        path.open("xb").close()
        path.unlink()


def open_output(path: Path, retried_ids: Collection[str]) -> BinaryIO:
    """Open ``path`` for appending behind its complete rows.

    A torn last row goes, and so do the errors of ``retried_ids``: every id has one row at the end.

    Raises:
        ConfigError: see ``read_rows``; nothing is changed then.
        OSError: the file cannot be written.
    """
    rows = read_rows(path)
    kept = [row.line for row in rows if not (row.is_error and row.id in retried_ids)]
    content = b"".join(line + b"\n" for line in kept)
    if path.exists() and path.read_bytes() != content:
        _replace(path, content)
    return path.open("ab")


def _parse_row(line: bytes) -> OutputRow | None:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return None
    if "error" not in row and not isinstance(row.get("text"), str):
        return None
    return OutputRow(row["id"], "error" in row, line)


def _is_torn_row(tail: bytes, follows_rows: bool) -> bool:
    if _parses(tail):
        return False
    # A few bytes alone in a file prove nothing; behind rows of ours they do.
    return tail.startswith(_ROW_START) or (follows_rows and _ROW_START.startswith(tail))


def _parses(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(path: Path, number: int) -> NoReturn:
    raise ConfigError(
        f"{path}:{number} is not a result of an offline batch, so the file is left as it is; "
        "name another --output"
    )


def _replace(path: Path, content: bytes) -> None:
    """Swap the whole file at once: a run killed here must not cost finished answers."""
    target = path.resolve()  # a symbolic link stays one
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
    try:
        with open(handle, "wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
        shutil.copymode(target, name)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
