"""Text, length, end and deltas of a sequence whose output is parsed."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_wire.records import FinishReason
from gateway.detokenize import SequenceText
from gateway.parsers.deltas import ContentDelta, Delta, merged
from gateway.parsers.output_parser import OutputParser

TOOL_CALLS = "tool_calls"
"""Finish reason of a sequence that stopped after it had called tools."""


class ParsedText:
    """A ``SequenceText`` and what its text means. Owner: one sequence's generator.

    Tokens go through one by one, so that all of it depends on the tokens alone, not on the chunks they came
    in: where the last wanted call is complete, the sequence ends.
    """

    def __init__(self, text: SequenceText, parser: OutputParser) -> None:
        self._text = text
        self._parser = parser
        self._deltas: list[Delta] = []
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """See ``SequenceText``."""
        return self._text.num_tokens

    def take_deltas(self) -> list[Delta]:
        """Return what is new since the last time. Mutates."""
        deltas, self._deltas = self._deltas, []
        return merged(deltas)

    def push(self, token_ids: Sequence[int]) -> str:
        """See ``SequenceText``."""
        if self._parser.passes_through:
            return self._push_content(token_ids)
        pieces: list[str] = []
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            was_reasoning = self._parser.is_reasoning
            pieces.append(self._take(self._text.push((token_id,))))
            self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
            if self._text.finish_reason is not None:
                self._end(self._text.finish_reason)
            elif self._parser.has_ended:
                self._end(FinishReason.STOP)
        return "".join(pieces)

    def finish(self, reason: str) -> str:
        """See ``SequenceText``."""
        if self.finish_reason is not None:
            return ""
        text = self._take(self._text.finish(reason))
        self._end(self._text.finish_reason or reason)
        return text

    def _push_content(self, token_ids: Sequence[int]) -> str:
        """All at once: nothing is left to be found in it."""
        if self.finish_reason is not None:
            return ""
        text = self._text.push(token_ids)
        if text:
            self._deltas.append(ContentDelta(text))
        if self._text.finish_reason is not None:
            self._end(self._text.finish_reason)
        return text

    def _take(self, text: str) -> str:
        if text:
            self._deltas += self._parser.push(text)
        return text

    def _end(self, reason: str) -> None:
        self._deltas += self._parser.flush()
        has_called = reason == FinishReason.STOP and self._parser.num_calls > 0
        self.finish_reason = TOOL_CALLS if has_called else str(reason)
