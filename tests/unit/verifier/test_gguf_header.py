"""Damaged and hostile GGUF files: one clause that says what is wrong, before anything is read by them."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from tiny_gguf import save_gguf

from verifier.gguf_header import Header, read_header

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
HUGE = 1 << 62
MOST_BYTES = 4 << 30
Damage = Callable[[bytes], bytes]
LIMITED = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MOST_BYTES}, {MOST_BYTES}))
from verifier import gguf
for file in sys.argv[2:]:
    print(json.dumps([file, gguf.main([file, sys.argv[1]])]), flush=True)
"""
"""Converts files in turn with little memory, and tells how each ended."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(kind: int, value: bytes, key: str = "key") -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, length: int, value: bytes = b"") -> bytes:
    return entry(GGUFValueType.ARRAY, struct.pack("<IQ", kind, length) + value)


def tensor(
    *shape: int,
    kind: int = GGMLQuantizationType.F32,
    offset: int = 0,
    dimensions: int | None = None,
) -> bytes:
    count = len(shape) if dimensions is None else dimensions
    sizes = struct.pack(f"<I{len(shape)}Q", count, *shape)
    return text("name") + sizes + struct.pack("<IQ", kind, offset)


def header(
    values: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    numbers = counts or (len(tensors), len(values))
    return b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join([*values, *tensors])


ALIGNMENT = "general.alignment"
UINT32, FLOAT64, STRING = GGUFValueType.UINT32, GGUFValueType.FLOAT64, GGUFValueType.STRING
DAMAGED = [
    (b"", "does not begin as one"),
    (b"PK\3\4" * 9, "does not begin as one"),
    (b"GGUF", "ends at byte 4, within its header"),
    (header(version=1), "version is 1"),
    (header(version=3 << 24), "version is 50331648"),  # the other byte order
    (header(counts=(HUGE, 0)), f"it has {HUGE} tensors"),
    (header(counts=(0, HUGE)), f"it has {HUGE} metadata"),
    (header(counts=(0, 9)), "ends at byte 24, within its header"),
    (header([struct.pack("<Q", HUGE)]), "ends at byte 32, within its header"),
    (header([entry(UINT32, bytes(4), "k" * (1 << 17))]), "a name of 131072 characters"),
    (header([struct.pack("<Q", 2) + b"\xff\xff" + bytes(12)]), "text at byte 32 is none"),
    (header([entry(STRING, struct.pack("<Q", 1) + b"\xff")]), "text at byte 47 is none"),
    (header([array(STRING, 1, struct.pack("<Q", 1) + b"\xff")]), "text at byte 59 is none"),
    (header([entry(99, bytes(8))]), "'key' is of an unknown type, 99"),
    (header([entry(STRING, struct.pack("<Q", HUGE))]), "within its header"),
    (header([array(GGUFValueType.UINT8, HUGE)]), f"'key' has {HUGE} elements"),
    (header([array(GGUFValueType.UINT8, 1 << 20)]), "within its header"),
    (header([array(STRING, 1 << 20)]), "within its header"),
    (header([array(GGUFValueType.ARRAY, 1, bytes(12))]), "holds arrays of arrays"),
    (header([entry(UINT32, struct.pack("<I", 0), ALIGNMENT)]), "no power of two"),
    (header([entry(UINT32, struct.pack("<I", 24), ALIGNMENT)]), "no power of two"),
    (header([entry(STRING, text("32"), ALIGNMENT)]), "no power of two"),
    (header([entry(UINT32, struct.pack("<I", 2), "a.block_count")]), "and there are 0 tensors"),
    (header([entry(FLOAT64, bytes(8), "a.block_count")]), "is no whole number"),
    (header(tensors=[tensor(dimensions=1 << 31)]), "dimensions"),
    (header(tensors=[tensor(1 << 40, 1 << 40)]), f"ends at byte {(1 << 82) + 96} of 68"),
    (header(tensors=[tensor(8, offset=HUGE)]), f"ends at byte {HUGE + 32 + 64} of 60"),
    (header(tensors=[tensor(8)]) + bytes(4 + 31), "ends at byte 96 of 95"),
    (header(tensors=[tensor(8, 0)]), "has rows of 8, not in blocks"),
    (header(tensors=[tensor(48, kind=GGMLQuantizationType.Q8_0)]), "not in blocks"),
    (header(tensors=[tensor(8, kind=1 << 20)]), "is of an unknown type, 1048576"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_what_a_file_has_no_room_for_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_header(file)


def test_a_sound_file_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    values = [
        entry(UINT32, struct.pack("<I", 64), ALIGNMENT),
        entry(STRING, text("words")),
        entry(GGUFValueType.BOOL, b"\1"),
        array(STRING, 2, text("a") + text("")),
        array(GGUFValueType.INT16, 3, bytes(6)),
    ]
    tensors = [tensor(8, 3), tensor(64, 2, kind=GGMLQuantizationType.Q8_0, offset=128)]
    data = header(values, tensors)
    data += bytes(-len(data) % 64 + 128 + 4 * 34)
    file.write_bytes(data)
    assert read_header(file) == Header(num_tensors=2, num_numbers=8 * 3 + 64 * 2)
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"ends at byte {len(data)} of {len(data) - 1}"):
        read_header(file)


def with_value(key: str, value: int) -> Damage:
    """Another number for a key of 32 bits."""

    def damage(data: bytes) -> bytes:
        at = data.index(text(key)) + len(text(key))
        assert data[at : at + 4] == struct.pack("<I", UINT32)
        return data[: at + 4] + struct.pack("<I", value) + data[at + 8 :]

    return damage


def renamed(old: str, new: str) -> Damage:
    """A key that is another."""
    assert len(old) == len(new)
    return lambda data: data.replace(text(old), text(new), 1)


MISLEADING = [
    (with_value("gemma3.block_count", 1 << 31), "2147483648, and there are 80 tensors"),
    (with_value("gemma3.embedding_length", 1 << 31), "numbers, and its tensors have 49024"),
    (with_value("gemma3.attention.key_length", 1 << 31), "numbers, and its tensors have 49024"),
    (with_value("gemma3.feed_forward_length", 1 << 31), "numbers, and its tensors have 49024"),
    (with_value("gemma3.feed_forward_length", 40), "its model wants"),
    (with_value("gemma3.embedding_length", 0), "its model wants"),
    (with_value("gemma3.attention.head_count", 0), "ZeroDivisionError"),
    (with_value("gemma3.attention.head_count", 1 << 31), "not a multiple"),
    (renamed("general.architecture", "general.architectura"), ""),
    (renamed("tokenizer.ggml.tokens", "tokenizer.ggml.tokenz"), ""),
    (renamed("tokenizer.ggml.model", "tokenizer.ggml.modem"), ""),
]


def test_files_that_mislead_end_in_one_line_and_little_memory(tmp_path: Path) -> None:
    sound = tmp_path / "sound.gguf"
    save_gguf(sound)
    data, files = sound.read_bytes(), {}
    for index, (damage, message) in enumerate(MISLEADING):
        files[tmp_path / f"{index}.gguf"] = message
        (tmp_path / f"{index}.gguf").write_bytes(damage(data))
    for index, (damaged, message) in enumerate(DAMAGED):
        files[tmp_path / f"header-{index}.gguf"] = message
        (tmp_path / f"header-{index}.gguf").write_bytes(damaged)
    before = sorted(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "out"), *map(str, files)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    print(done.stderr)
    assert done.returncode == 0
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[str(f), 1] for f in files]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for (file, message), error in zip(files.items(), errors, strict=True):
        assert error.startswith(f"error: {file} is no GGUF file that transformers can read: ")
        assert message in error
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before
