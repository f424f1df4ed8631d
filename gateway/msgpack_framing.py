"""msgpack in place of JSON: one object per answer, or a stream of frames.

A stream is a row of frames. Each is four bytes, the length of what follows, big endian, and one msgpack
value:

1. first a map with what all chunks have in common: ``id``, ``object``, ``created``, ``model`` and
   ``system_fingerprint``, as far as these chunks have them;
2. then one map for every event: the chunk that the event stream would carry, without those fields. Both maps
   together are exactly that chunk;
3. last nil, where the event stream has ``[DONE]``. A stream that ends without it is incomplete. An error is a
   map with ``error``, and the last frame.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgpack
from starlette.responses import JSONResponse, Response

from gateway.framing import PLACE, Framing, SseFraming

MSGPACK = "application/msgpack"
MSGPACK_NAMES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
HEAD_FIELDS = ("id", "object", "created", "model", "system_fingerprint")
LENGTH_BYTES = 4


def frame(value: object) -> bytes:
    """Return ``value`` as one frame."""
    data: bytes = msgpack.packb(value, default=str)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class MsgpackText(NamedTuple):
    """A frame of which only one string changes."""

    before: bytes
    after: bytes
    pack: Callable[[str], bytes]

    def fill(self, text: str) -> bytes:
        """Return the frame with ``text``."""
        data = self.before + self.pack(text) + self.after
        return len(data).to_bytes(LENGTH_BYTES, "big") + data


class MsgpackFraming:
    """Length-prefixed msgpack. Owner: one response.

    It keeps a packer: making one costs more than packing an event's text.
    """

    media_type = MSGPACK
    done = frame(None)

    def __init__(self) -> None:
        self._pack = msgpack.Packer().pack

    def head(self, chunk: Mapping[str, Any]) -> bytes:
        """See ``Framing``: the first frame, if chunks have anything in common."""
        common = {name: chunk[name] for name in HEAD_FIELDS if name in chunk}
        return frame(common) if common else b""

    def event(self, data: Mapping[str, Any]) -> bytes:
        """Return one frame, without what the first one has said."""
        return frame({name: value for name, value in data.items() if name not in HEAD_FIELDS})

    def text_template(self, sample: Mapping[str, Any]) -> MsgpackText:
        """See ``Framing``."""
        before, _, after = self.event(sample)[LENGTH_BYTES:].rpartition(msgpack.packb(PLACE))
        return MsgpackText(before, after, self._pack)


def accepts_msgpack(accept: str | None) -> bool:
    """Whether an ``Accept`` header names msgpack; a client that only takes anything gets JSON."""
    for entry in (accept or "").lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name in MSGPACK_NAMES:
            return not any(part in ("q=0", "q=0.0", "q=0.00", "q=0.000") for part in parameters)
    return False


def choose_framing(accept: str | None) -> Framing:
    """Return how a stream is written for a client that sends this ``Accept`` header."""
    return MsgpackFraming() if accepts_msgpack(accept) else SseFraming()


def object_response(
    value: object,
    accept: str | None,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return one object as the client wants it: msgpack if it names that, else JSON."""
    if not accepts_msgpack(accept):
        return JSONResponse(value, status, headers)
    return Response(msgpack.packb(value, default=str), status, headers, MSGPACK)
