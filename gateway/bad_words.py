"""Words that an answer must not hold, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflash_wire.processors import Processors
from gateway.chat_tokenizer import ChatTokenizer
from gateway.validation import SequencePlan


def add_bad_words(
    plans: list[SequencePlan], words: Sequence[str], tokenizer: ChatTokenizer
) -> list[SequencePlan]:
    """Return the plans of a request that forbids ``words``."""
    found = bad_word_ids(words, tokenizer)
    if not found:
        return plans
    changed: list[SequencePlan] = []
    for plan in plans:
        processors = replace(plan.request.processors or Processors(), bad_words=found)
        changed.append(replace(plan, request=replace(plan.request, processors=processors)))
    return changed


def bad_word_ids(words: Sequence[str], tokenizer: ChatTokenizer) -> list[list[int]]:
    """Return the token sequences that write these words, each once.

    A word counts as it is written at the beginning of a text and as it is written behind a space. (vLLM
    leaves the second out where it takes another number of tokens; most words would come through.) Other
    ways to write it are not recognised.
    """
    texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    found = dict.fromkeys(tuple(tokenizer.encode_plain(text)) for text in texts)
    return [list(word) for word in found if word]
