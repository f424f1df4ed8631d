"""Prompts that ask for a Python function the standard library does not have.

Signatures with type hints, a docstring of one to three sentences and examples in doctest form, all drawn
from pools. There is no answer: only the target's own responses to these prompts are trained on, so that the
drafter sees more code than the library has documented functions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from drafter.training.demo.corpus import CODE_REQUEST, Conversation

MAX_SENTENCE_CHARS = 160
_SIGNATURE = re.compile(r"^(?:async )?def (\w+)\(([^)]*)\)", re.MULTILINE)
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_SENTENCE = re.compile(r"[A-Z][^.?!\n]*(?:\n[^.?!\n]+)*[.?!]")


def _integer(rng: random.Random) -> str:
    return str(rng.choice((rng.randint(-9, 20), rng.randint(0, 9), rng.randint(10, 999))))


def _decimal(rng: random.Random) -> str:
    return f"{rng.randint(0, 20)}.{rng.randint(0, 9)}"


def _text(rng: random.Random) -> str:
    word = "".join(rng.choice("abcdeilmnorst") for _ in range(rng.randint(1, 7)))
    return f"'{word}'"


def _flag(rng: random.Random) -> str:
    return rng.choice(("True", "False"))


def _list_of(item: Callable[[random.Random], str]) -> Callable[[random.Random], str]:
    def literal(rng: random.Random) -> str:
        return f"[{', '.join(item(rng) for _ in range(rng.randint(0, 6)))}]"

    return literal


TYPES: dict[str, Callable[[random.Random], str]] = {
    "int": _integer,
    "float": _decimal,
    "str": _text,
    "bool": _flag,
    "List[int]": _list_of(_integer),
    "List[float]": _list_of(_decimal),
    "List[str]": _list_of(_text),
}


@dataclass(frozen=True)
class StubPools:
    """What stubs are put together from."""

    words: list[str]
    parameters: list[str]
    sentences: list[str]

    @classmethod
    def of(cls, rows: list[Conversation]) -> StubPools:
        """Collect names and sentences from training conversations: docstrings and word problems."""
        words: set[str] = set()
        parameters: set[str] = set()
        sentences: set[str] = set()
        for row in rows:
            texts = [row.user] if row.kind == "math" else _DOCSTRING.findall(row.user)
            for text in texts:
                found = (" ".join(s.split()) for s in _SENTENCE.findall(text))
                sentences.update(s for s in found if 20 <= len(s) <= MAX_SENTENCE_CHARS)
            for name, arguments in _SIGNATURE.findall(row.user):
                words.update(w for w in name.lower().split("_") if len(w) > 2 and w.isalpha())
                names = (part.split("=")[0].split(":")[0].strip() for part in arguments.split(","))
                parameters.update(n for n in names if n.isidentifier() and n not in ("self", "cls"))
        return cls(sorted(words), sorted(parameters), sorted(sentences))


def write_stub(pools: StubPools, rng: random.Random) -> str:
    """Return one function head with docstring, perhaps with imports, type hints and examples."""
    name = "_".join(rng.sample(pools.words, rng.randint(1, 3)))
    is_typed = rng.random() < 0.5
    types = rng.choices(list(TYPES), k=rng.choice((1, 1, 2, 2, 3)))
    returned = rng.choice(list(TYPES))
    names = rng.sample(pools.parameters, len(types))
    hints = [f"{n}: {t}" if is_typed else n for n, t in zip(names, types, strict=True)]
    arrow = f" -> {returned}" if is_typed else ""
    sentences = rng.sample(pools.sentences, rng.choice((1, 1, 2, 3)))
    lines = [*_wrap(sentences, rng), *_examples(name, types, returned, rng)]
    quotes = rng.choice(('"""', '"""', "'''"))
    imports = is_typed and any("List" in t for t in [*types, returned])
    head = "from typing import List\n\n\n" if imports else ""
    opening = rng.choice(("", " ", "\n    "))
    body = "\n    ".join(lines)
    return (
        f"{head}def {name}({', '.join(hints)}){arrow}:\n    {quotes}{opening}{body}\n    {quotes}"
    )


def _wrap(sentences: list[str], rng: random.Random) -> list[str]:
    if rng.random() < 0.5:
        return sentences
    words, lines, width = " ".join(sentences).split(), [""], rng.randint(55, 85)
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _examples(name: str, types: list[str], returned: str, rng: random.Random) -> list[str]:
    form, lines = rng.choice(("doctest", "doctest", "arrow", "none")), []
    for _ in range(rng.randint(1, 3)):
        call = f"{name}({', '.join(TYPES[t](rng) for t in types)})"
        value = TYPES[returned](rng)
        if form == "doctest":
            lines += [f">>> {call}", value]
        elif form == "arrow":
            lines.append(f"{call} {rng.choice(('==', '=>', '➞'))} {value}")
    return lines


def code_stubs(rows: list[Conversation], count: int, seed: int) -> list[Conversation]:
    """Return ``count`` prompts without answers, pooled from training conversations."""
    rng, pools = random.Random(seed), StubPools.of(rows)
    return [Conversation("stub", CODE_REQUEST + write_stub(pools, rng), "") for _ in range(count)]
