"""Token ids to text, one token at a time, so that chunk boundaries can never show."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dflash_wire.records import FinishReason
from gateway.stop_strings import StopMatcher


class Detokenizer(Protocol):
    """Incremental decoding of one sequence, whatever the tokenizer. Owner: one sequence."""

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, which may be empty."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete, as if pushed one by one."""

    def flush(self) -> str:
        """Return incomplete bytes as replacement characters and start afresh."""


class StreamDetokenizer:
    """A ``Detokenizer`` for any tokenizer, through its own decoder. Owner: one sequence.

    A character whose bytes are spread over several tokens comes out with the last of them.

    Args:
        special_ids: tokens without text (end of turn, padding, ...).
        shown: text of those that have one after all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_ids: Collection[int] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._shown = shown or {}
        self._stream = DecodeStream(skip_special_tokens=True)
        self._emitted: list[int] = []
        """Tokens of the last text that came out: the context the pending ones are decoded in."""
        self._pending: list[int] = []
        """Tokens since then: the beginning of a character."""

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes, which may be empty."""
        if token_id in self._special_ids:
            # The stream would skip it as well, but would decode it again with every later token.
            return self.flush() + self._shown[token_id] if token_id in self._shown else ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # NOTE: DecodeStream gives up ("Invalid prefix") when invalid UTF-8 makes the decoded
            # text change in its past. What it held cannot become a character any more.
            text = self.flush()
        if text is None:
            return ""
        self._emitted, self._pending = self._pending, []
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; grouped, the stream would see other prefixes."""
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Return incomplete bytes as replacement characters and start afresh."""
        before = self._tokenizer.decode(self._emitted, skip_special_tokens=True)
        after = self._tokenizer.decode(self._emitted + self._pending, skip_special_tokens=True)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._emitted, self._pending = self._pending, []
        return after[len(before) :]


class SequenceText:
    """Text, length and end of one sequence's output. Owner: its generator.

    All three depend on the tokens alone, not on the chunks they came in.

    Args:
        includes_stop: what ends the sequence is part of its text, a stop token too if it has any.
        min_tokens: stop strings count behind so many tokens, as stop tokens do.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        stop_token_ids: Collection[int],
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._includes_stop = includes_stop
        self._stops = StopMatcher(stop_strings, includes_stop)
        self._is_plain = not stop_strings
        """Without stop strings and before its end, only a stop token makes a token special."""
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Output tokens so far: the one that ended the sequence counts, those after it do not."""
        self.finish_reason: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text these tokens add; tokens after the end add nothing. Mutates."""
        if self._is_plain and self._stop_token_ids.isdisjoint(token_ids):
            self.num_tokens += len(token_ids)
            return self._detokenizer.push_all(token_ids)
        pieces: list[str] = []
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            self.num_tokens += 1
            if token_id in self._stop_token_ids:
                if self._includes_stop:
                    pieces.append(self._stops.push(self._detokenizer.push(token_id)))
                pieces.append(self.finish(FinishReason.STOP))
                break
            new_text = self._detokenizer.push(token_id)
            if self.num_tokens <= self._min_tokens:
                pieces.append(self._stops.push_exempt(new_text))
                continue
            pieces.append(self._stops.push(new_text))
            if self._stops.has_matched:
                self._end(FinishReason.STOP)
        return "".join(pieces)

    def finish(self, reason: str) -> str:
        """End the sequence, unless it has ended already; return the text held back. Mutates."""
        if self.finish_reason is not None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        self._end(FinishReason.STOP if self._stops.has_matched else reason)
        return text + self._stops.flush()

    def _end(self, reason: str) -> None:
        self.finish_reason = str(reason)
        self._is_plain = False
