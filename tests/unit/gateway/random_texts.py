"""Texts that a schema's grammar allows, written at random with the shipped vocabulary."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from gateway.grammars import grammar_text, json_form
from verifier.grammars import GrammarPool, load_vocabulary
from verifier.matching import GrammarMatch

TARGET = Path(__file__).resolve().parents[3] / "models/demo/target"
VOCAB, END = 3072, 2
MOST_TOKENS = 60
CLOSING = b'"}],:0123456789'
"""Beginnings that bring a text to its end."""


@lru_cache
def _vocabulary() -> tuple[GrammarPool, list[bytes]]:
    info = load_vocabulary(str(TARGET), VOCAB, [END])
    return GrammarPool(lambda: info), [bytes(token) for token in info.decoded_vocab]


def random_texts(schema: Any, count: int, rng: random.Random) -> list[str]:
    """Return the texts of ``count`` walks that came to an end in time."""
    pool, tokens = _vocabulary()
    compiled = pool.compile(grammar_text(json_form(schema)))
    found = []
    for _ in range(count):
        match, text = GrammarMatch(compiled, VOCAB, [END]), b""
        for _ in range(MOST_TOKENS):
            legal = match.walk((), ()).legal[0].nonzero()[:, 0].tolist()
            if END in legal and (len(legal) == 1 or rng.random() < 0.5):
                found.append(text.decode(errors="replace"))
                break
            legal = [t for t in legal if t != END]
            short = [t for t in legal if tokens[t][:1] in CLOSING and len(tokens[t]) < 3]
            token = rng.choice(short if short and rng.random() < 0.7 else legal)
            match.advance([token])
            text += tokens[token]
    return found
