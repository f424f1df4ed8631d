"""A vocabulary of 32 tokens, grammars that it can spell, and one that it cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from xgrammar import GrammarMatcher, TokenizerInfo

from verifier.grammars import GrammarPool, vocabulary

TOKENS = (
    *(
        b"a",
        b"b",
        b"ab",
        b"ba",
        b"aab",
        b"c",
        b'"',
        b"{",
        b"}",
        b":",
        b",",
        b" ",
        b"1",
        b"12",
        b"0",
    ),
    *(b"[", b"]", b"true", b"t", b"rue", b"null", b"x", b"xy", b'{"', b'":', b'",', b'"}', b'"a"'),
    *(b"bb", b"", b"", b"</s>"),
)
END = 31


def tag(form: dict[str, Any]) -> str:
    """Return a structural tag as requests carry it."""
    return json.dumps({"type": "structural_tag", "format": form})


RECORD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "x": {"enum": ["ab", "bab"]}},
    "required": ["a", "x"],
}
CALLS: dict[str, Any] = {
    "type": "triggered_tags",
    "triggers": ["xy"],
    "tags": [
        {
            "type": "tag",
            "begin": 'xy"',
            "content": {"type": "json_schema", "json_schema": RECORD},
            "end": "]",
        },
        {
            "type": "tag",
            "begin": "xyb",
            "content": {"type": "regex", "pattern": "(ab)*"},
            "end": "c",
        },
    ],
}
"""Any text, in which calls begin by themselves."""
FORMS: dict[str, dict[str, Any]] = {
    "letters": {"type": "regex", "pattern": "(ab|b)*c"},
    "counted": {"type": "regex", "pattern": "a{3,6}b{2,}"},
    "forced": {"type": "const_string", "value": "abbabaabbaababba"},
    "choice": {
        "type": "or",
        "elements": [{"type": "const_string", "value": v} for v in ("aab", "abba", "c")],
    },
    "record": {"type": "json_schema", "json_schema": RECORD, "max_whitespace_cnt": 2},
    "dumped": {"type": "json_schema", "json_schema": RECORD},
    "lists": {
        "type": "grammar",
        "grammar": 'root ::= "[" (root ("," root)*)? "]" | "1" | "true"',
    },
    "ambiguous": {"type": "grammar", "grammar": 'root ::= root root | "a" | "ab" | "b"'},
    "thought": {
        "type": "sequence",
        "elements": [
            {"type": "any_text", "excludes": ["xy"]},
            {"type": "const_string", "value": "xy"},
            {"type": "json_schema", "json_schema": RECORD, "max_whitespace_cnt": 1},
        ],
    },
    "calls": CALLS,
    "thought, calls": {
        "type": "or",
        "elements": [
            {"type": "any_text", "excludes": ["bb"]},
            {
                "type": "sequence",
                "elements": [
                    {"type": "any_text", "excludes": ["bb"]},
                    {"type": "const_string", "value": "bb"},
                    CALLS,
                ],
            },
        ],
    },
    "impossible": {"type": "const_string", "value": "abz"},
}
GRAMMARS = {name: tag(form) for name, form in FORMS.items()}


def toy_vocabulary() -> TokenizerInfo:
    return vocabulary(TOKENS, [END])


def toy_pool() -> GrammarPool:
    return GrammarPool(toy_vocabulary)


@lru_cache
def _shared_pool() -> GrammarPool:
    return toy_pool()


def legal_tokens(grammar: str, output: Sequence[int]) -> set[int]:
    """What may follow an output: found from its beginning, without going back and forth."""
    matcher = GrammarMatcher(_shared_pool().compile(grammar))
    for token_id in output:
        if not matcher.accept_token(token_id):
            return {END}  # it went on behind its end, or there was no way on
        if matcher.is_terminated():
            return {END}
    mask = torch.zeros(1, 1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask)
    bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
    return {int(i) for i in bits.nonzero()[0]} or {END}


def follows(grammar: str, output: Sequence[int]) -> bool:
    """Whether every token of an output was legal."""
    return all(token in legal_tokens(grammar, output[:i]) for i, token in enumerate(output))


def spelled(output: Sequence[int]) -> str:
    return b"".join(b"" if t == END else TOKENS[t] for t in output).decode()
