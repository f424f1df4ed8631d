from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gateway import detokenize
from gateway.chat_tokenizer import ChatTokenizer
from gateway.detokenize import Detokenizer, SequenceText

Encode = Callable[[str], list[int]]
SAFE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def decode_all(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    return "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()


def test_a_character_comes_out_with_its_last_byte(tokenizer: ChatTokenizer, encode: Encode) -> None:
    token_ids = encode("😀")
    assert len(token_ids) == 4
    detokenizer = tokenizer.new_detokenizer()
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["", "", "", "😀"]


@SAFE
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20))
def test_any_text_survives(text: str, tokenizer: ChatTokenizer, encode: Encode) -> None:
    assume("<|" not in text)  # special tokens have no text
    assert decode_all(tokenizer.new_detokenizer(), encode(text)) == text


@SAFE
@given(token_ids=st.lists(st.integers(0, 329), max_size=30))
def test_any_tokens_decode_as_in_one_go(
    token_ids: list[int],
    tokenizer: ChatTokenizer,
    hf_tokenizer: PreTrainedTokenizerFast,
) -> None:
    whole = hf_tokenizer.decode(token_ids, skip_special_tokens=True)
    assert decode_all(tokenizer.new_detokenizer(), token_ids) == whole


def test_incomplete_bytes_are_flushed_as_replacements(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    detokenizer = tokenizer.new_detokenizer()
    assert detokenizer.push(encode("x")[0]) == "x"
    assert [detokenizer.push(token_id) for token_id in encode("😀")[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(encode("y")[0]) == "y"


def test_special_tokens_have_no_text_and_do_not_split_characters(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    first, *rest = encode("é")
    special = encode("<|im_end|>")
    assert decode_all(tokenizer.new_detokenizer(), [first, *special, *rest, *special]) == "é"


def test_a_stream_that_gives_up_loses_nothing(
    tokenizer: ChatTokenizer, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fragile:
        def __init__(self, skip_special_tokens: bool) -> None:
            self.num_steps = 0

        def step(self, backend: Tokenizer, token_id: int) -> str | None:
            self.num_steps += 1
            if self.num_steps == 2:
                raise Exception("Invalid prefix encountered")
            return backend.decode([token_id])

    monkeypatch.setattr(detokenize, "DecodeStream", Fragile)
    token_ids = encode("one two three four")
    assert len(token_ids) >= 4
    assert decode_all(tokenizer.new_detokenizer(), token_ids) == "one two three four"


def test_a_bad_id_is_an_error_not_silence(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(OverflowError):
        tokenizer.new_detokenizer().push(-1)


def test_stop_token_counts_and_gives_no_text(tokenizer: ChatTokenizer, encode: Encode) -> None:
    a, b, c = encode("a")[0], encode("b")[0], encode("c")[0]
    text = SequenceText(tokenizer.new_detokenizer(), [], [b])
    assert text.push([a, b, c]) == "a"
    assert (text.num_tokens, text.finish_reason) == (2, "stop")
    assert text.push([c]) == ""
    assert text.num_tokens == 2


def test_held_text_and_bytes_are_flushed_at_the_end(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    text = SequenceText(tokenizer.new_detokenizer(), ["abc\ufffd!"], [])
    assert text.push(encode("x") + encode("a") + encode("b") + encode("c")) == "x"
    assert text.push(encode("😀")[:2]) == ""
    assert text.finish("length") == "abc\ufffd"
    assert text.finish_reason == "length"


def test_a_stop_string_completed_by_the_last_token_beats_length(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    text = SequenceText(tokenizer.new_detokenizer(), ["b"], [])
    assert text.push([*encode("a"), *encode("b")]) == "a"
    assert text.finish("length") == ""
    assert text.finish_reason == "stop"


@SAFE
@given(
    token_ids=st.lists(st.integers(4, 329), max_size=24),
    stops=st.lists(st.sampled_from(["e", "th", "he q", "\ufffd", " ", "own f"]), max_size=3),
    stop_ids=st.lists(st.integers(4, 329), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=6),
    reason=st.sampled_from(["length", "stop"]),
)
def test_any_chunking_gives_the_same(
    token_ids: list[int],
    stops: list[str],
    stop_ids: list[int],
    cuts: list[int],
    reason: str,
    tokenizer: ChatTokenizer,
) -> None:
    def run(chunks: list[list[int]]) -> tuple[str, int, str | None]:
        text = SequenceText(tokenizer.new_detokenizer(), stops, stop_ids)
        out = "".join(text.push(chunk) for chunk in chunks) + text.finish(reason)
        return out, text.num_tokens, text.finish_reason

    edges = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    chunks = [token_ids[a:b] for a, b in pairwise(edges)]
    one_by_one = run([[token_id] for token_id in token_ids])
    assert run(chunks) == one_by_one
    assert run([token_ids]) == one_by_one
