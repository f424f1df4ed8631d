"""A look at a GGUF file's header, before anything is read as the header says.

The header counts what follows it: metadata, elements of arrays, tensors and their sizes. The gguf package
believes these counts, and transformers builds a model by them, so a damaged file would end in any error there
is, or take all memory first. Here nothing of the file is kept, and no count is more than it has room for.

Layout: little-endian; magic, version, number of tensors, number of metadata; metadata (key, type, value);
descriptions of tensors (name, sizes, type, offset); padding; their data.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
COUNTS = struct.Struct("<QQ")
WORD, LENGTH = struct.Struct("<I"), struct.Struct("<Q")
WHOLE = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: WORD,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.UINT64: LENGTH,
    GGUFValueType.INT64: struct.Struct("<q"),
}
SIZES = {kind: form.size for kind, form in WHOLE.items()} | {
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.FLOAT64: 8,
    GGUFValueType.BOOL: 1,
}
MOST_NAMES = 1 << 14
"""Metadata, and tensors; models have some tens and some hundreds. Each takes a kilobyte when it is read."""
MOST_ELEMENTS = 1 << 21
"""Of all arrays together; nearly a kilobyte each, too. Vocabularies of 262,144 tokens have 786,432."""
MOST_LENGTH = 1 << 16
"""Characters of a name. Values may be longer, as chat templates are."""
MOST_DIMENSIONS = 4
ALIGNMENT = "general.alignment"
NUM_LAYERS = ".block_count"


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds."""

    num_tensors: int
    num_numbers: int
    """Of all tensors together."""


def read_header(file: Path) -> Header:
    """Check that a file's header is whole, and that the file has room for what it says.

    Raises:
        ValueError: it is not; one clause that says what is wrong, and where.
        OSError: the file cannot be read.
    """
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin as one")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(data).read()


class _HeaderReader:
    """Walks along a header. Owner: ``read_header``; all methods move on.

    Args:
        data: the file, which begins with the magic.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = len(MAGIC)
        self._num_elements = 0

    def read(self) -> Header:
        """Read all of it."""
        version = self._whole(WORD)
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, not one of {VERSIONS}")
        num_tensors, num_values = self._whole(LENGTH), self._whole(LENGTH)
        for what, count in (("tensors", num_tensors), ("metadata", num_values)):
            if count > MOST_NAMES:
                raise ValueError(f"it says that it has {count} {what}")
        alignment = GGUF_DEFAULT_ALIGNMENT
        for _ in range(num_values):
            key = self._name()
            value = self._value(key)
            if key.endswith(NUM_LAYERS) and (value is None or value > num_tensors):
                said = "no whole number" if value is None else value
                raise ValueError(f"{key!r} is {said}, and there are {num_tensors} tensors")
            if key == ALIGNMENT:
                alignment = value or 0
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"{ALIGNMENT} is no power of two")
        tensors = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._at // alignment) * alignment
        for name, offset, num_bytes, _ in tensors:
            if start + offset + num_bytes > self._size:
                raise ValueError(
                    f"tensor {name!r} ends at byte {start + offset + num_bytes} of {self._size}"
                )
        return Header(num_tensors, sum(numbers for *_, numbers in tensors))

    def _skip(self, num_bytes: int) -> int:
        """Go over bytes that must be there; return where they begin."""
        at, self._at = self._at, self._at + num_bytes
        if self._at > self._size:
            raise ValueError(f"it ends at byte {self._size}, within its header")
        return at

    def _whole(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._skip(form.size))
        return int(value)

    def _name(self) -> str:
        name = self._text()
        if len(name) > MOST_LENGTH:
            raise ValueError(f"it has a name of {len(name)} characters")
        return name

    def _text(self) -> str:
        length = self._whole(LENGTH)
        at = self._skip(length)
        try:
            return self._data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"what should be text at byte {at} is none") from error

    def _kind(self, key: str) -> GGUFValueType:
        number = self._whole(WORD)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise ValueError(f"{key!r} is of an unknown type, {number}") from error

    def _value(self, key: str) -> int | None:
        """Go over a value; return it if it is a whole number."""
        kind = self._kind(key)
        if kind in WHOLE:
            return self._whole(WHOLE[kind])
        if kind is GGUFValueType.ARRAY:
            self._array(key)
        elif kind is GGUFValueType.STRING:
            self._text()
        else:
            self._skip(SIZES[kind])
        return None

    def _array(self, key: str) -> None:
        kind, length = self._kind(key), self._whole(LENGTH)
        self._num_elements += length
        if self._num_elements > MOST_ELEMENTS:
            raise ValueError(f"{key!r} has {length} elements")
        if kind is GGUFValueType.ARRAY:
            raise ValueError(f"{key!r} holds arrays of arrays")
        if kind is not GGUFValueType.STRING:
            self._skip(length * SIZES[kind])
            return
        for _ in range(length):
            self._text()

    def _tensor(self) -> tuple[str, int, int, int]:
        """Its name, offset behind the padding, size in bytes, and how many numbers it has."""
        name, num_dimensions = self._name(), self._whole(WORD)
        if not 0 < num_dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = [self._whole(LENGTH) for _ in range(num_dimensions)]
        number, offset = self._whole(WORD), self._whole(LENGTH)
        try:
            block_length, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        except (ValueError, KeyError) as error:
            raise ValueError(f"tensor {name!r} is of an unknown type, {number}") from error
        if shape[0] % block_length or 0 in shape:
            raise ValueError(f"tensor {name!r} has rows of {shape[0]}, not in blocks")
        numbers = prod(shape)
        return name, offset, numbers // block_length * block_bytes, numbers
