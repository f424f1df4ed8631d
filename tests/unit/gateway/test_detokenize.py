from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace
from transformers import PreTrainedTokenizerFast

from gateway import detokenize
from gateway.byte_detokenize import ByteDetokenizer, token_bytes
from gateway.chat_tokenizer import ChatTokenizer
from gateway.detokenize import Detokenizer, SequenceText, StreamDetokenizer

Encode = Callable[[str], list[int]]
Make = Callable[[], Detokenizer]
SAFE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="session", params=["bytes", "stream"])
def make(request: pytest.FixtureRequest, hf_tokenizer: PreTrainedTokenizerFast) -> Make:
    """Return a maker of detokenizers of each kind."""
    backend = hf_tokenizer.backend_tokenizer
    if request.param == "stream":
        return lambda: StreamDetokenizer(backend, hf_tokenizer.all_special_ids)
    table = token_bytes(backend, hf_tokenizer.all_special_ids)
    assert table is not None
    return lambda: ByteDetokenizer(table)


def decode_all(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    return "".join(detokenizer.push(token_id) for token_id in token_ids) + detokenizer.flush()


def test_a_character_comes_out_with_its_last_byte(make: Make, encode: Encode) -> None:
    token_ids = encode("😀")
    assert len(token_ids) == 4
    detokenizer = make()
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["", "", "", "😀"]


@SAFE
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=20))
def test_any_text_survives(text: str, make: Make, encode: Encode) -> None:
    assume("<|" not in text)  # special tokens have no text
    assert decode_all(make(), encode(text)) == text


@SAFE
@given(token_ids=st.lists(st.integers(0, 329), max_size=30))
def test_any_tokens_decode_as_in_one_go(
    token_ids: list[int],
    make: Make,
    hf_tokenizer: PreTrainedTokenizerFast,
) -> None:
    whole = hf_tokenizer.decode(token_ids, skip_special_tokens=True)
    assert decode_all(make(), token_ids) == whole


def test_incomplete_bytes_are_flushed_as_replacements(make: Make, encode: Encode) -> None:
    detokenizer = make()
    assert detokenizer.push(encode("x")[0]) == "x"
    assert [detokenizer.push(token_id) for token_id in encode("😀")[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(encode("y")[0]) == "y"


def test_special_tokens_have_no_text_and_do_not_split_characters(
    make: Make, encode: Encode
) -> None:
    first, *rest = encode("é")
    special = encode("<|im_end|>")
    assert decode_all(make(), [first, *special, *rest, *special]) == "é"


def test_a_stream_that_gives_up_loses_nothing(
    hf_tokenizer: PreTrainedTokenizerFast, encode: Encode, monkeypatch: pytest.MonkeyPatch
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
    assert (
        decode_all(StreamDetokenizer(hf_tokenizer.backend_tokenizer), token_ids)
        == "one two three four"
    )


def test_a_bad_id_is_an_error_not_silence(make: Make) -> None:
    with pytest.raises(OverflowError):
        make().push(-1)


def test_stop_token_counts_and_gives_no_text(make: Make, encode: Encode) -> None:
    a, b, c = encode("a")[0], encode("b")[0], encode("c")[0]
    text = SequenceText(make(), [], [b])
    assert text.push([a, b, c]) == "a"
    assert (text.num_tokens, text.finish_reason) == (2, "stop")
    assert text.push([c]) == ""
    assert text.num_tokens == 2


def test_held_text_and_bytes_are_flushed_at_the_end(make: Make, encode: Encode) -> None:
    text = SequenceText(make(), ["abc\ufffd!"], [])
    assert text.push(encode("x") + encode("a") + encode("b") + encode("c")) == "x"
    assert text.push(encode("😀")[:2]) == ""
    assert text.finish("length") == "abc\ufffd"
    assert text.finish_reason == "length"


def test_a_stop_string_completed_by_the_last_token_beats_length(make: Make, encode: Encode) -> None:
    text = SequenceText(make(), ["b"], [])
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
    make: Make,
) -> None:
    def run(chunks: list[list[int]]) -> tuple[str, int, str | None]:
        text = SequenceText(make(), stops, stop_ids)
        out = "".join(text.push(chunk) for chunk in chunks) + text.finish(reason)
        return out, text.num_tokens, text.finish_reason

    edges = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    chunks = [token_ids[a:b] for a, b in pairwise(edges)]
    one_by_one = run([[token_id] for token_id in token_ids])
    assert run(chunks) == one_by_one
    assert run([token_ids]) == one_by_one


def test_the_gateway_takes_the_quick_way_where_it_can(
    tokenizer: ChatTokenizer, hf_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert isinstance(tokenizer.new_detokenizer(), ByteDetokenizer)
    other = Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str())
    other.decoder = Metaspace()  # a token's text depends on its place there
    assert token_bytes(other, ()) is None


def test_special_tokens_may_be_shown(hf_tokenizer: PreTrainedTokenizerFast, encode: Encode) -> None:
    end, special = encode("<|im_end|>"), hf_tokenizer.all_special_ids
    backend = hf_tokenizer.backend_tokenizer
    stream = StreamDetokenizer(backend, special, {end[0]: "<|im_end|>"})
    tokens = [*encode("the"), encode("😀")[0], *end, *encode(" fox<|im_start|>.")]
    expected = "the\ufffd<|im_end|> fox."
    assert decode_all(stream, tokens) == expected
    shown = ChatTokenizer(hf_tokenizer).new_detokenizer(frozenset({"<|im_end|>", "no token"}))
    assert isinstance(shown, ByteDetokenizer)
    assert decode_all(shown, tokens) == expected


def test_added_tokens_are_written_as_they_read(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    backend = Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str())
    backend.add_tokens(["<think> é"])
    token_id = backend.token_to_id("<think> é")
    table = token_bytes(backend, ())
    assert table is not None
    assert ByteDetokenizer(table).push(token_id) == backend.decode([token_id]) == "<think> é"


def test_ids_beyond_the_vocabulary_have_no_text(make: Make) -> None:
    """Models pad their vocabulary; the tokenizer's own decoder skips such ids as well."""
    assert make().push(100_000) == ""


@SAFE
@given(token_ids=st.lists(st.integers(0, 335), max_size=30), cut=st.integers(0, 30))
def test_all_at_once_is_one_by_one(token_ids: list[int], cut: int, make: Make) -> None:
    grouped, single = make(), make()
    text = grouped.push_all(token_ids[:cut])
    assert text == "".join(map(single.push, token_ids[:cut]))
    assert text + grouped.push_all(token_ids[cut:]) + grouped.flush() == decode_all(
        make(), token_ids
    )
