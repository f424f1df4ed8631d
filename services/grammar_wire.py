"""How the gateway and its grammar worker talk: four bytes of length, big endian, then a text in UTF-8."""

from __future__ import annotations

import struct
from typing import IO

LENGTH = struct.Struct(">I")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Write one frame."""
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()
