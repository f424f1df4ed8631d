"""Text of the demo pair: grade-school word problems and Python from the standard library.

Everything is turned into *conversations* in the chat template that is served, plus a share of raw
source for long contexts. Held-out rows are chosen by hash, so they never depend on order.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CALCULATOR_MARK = re.compile(r"<<[^>]*>>")
SKIPPED_FOLDERS = ("site-packages", "/test", "idlelib", "lib2to3", "turtledemo", "__pycache__")
HELD_OUT_PERCENT = 4

CODE_REQUEST = "Complete this Python function:\n"
"""What comes before a function head that is to be completed."""


@dataclass(frozen=True)
class Conversation:
    """One user turn and the assistant's answer."""

    kind: str
    user: str
    assistant: str

    @property
    def is_held_out(self) -> bool:
        """Whether this row is kept away from every training run."""
        digest = hashlib.sha256(self.user.encode()).digest()
        return digest[0] * 100 < HELD_OUT_PERCENT * 256


def word_problems(path: Path) -> Iterator[Conversation]:
    """Yield word problems from a JSONL file with ``question`` and ``answer`` (GSM8K's form)."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            answer = CALCULATOR_MARK.sub("", row["answer"])
            body, _, final = answer.partition("####")
            text = f"{body.strip()}\nThe answer is {final.strip()}."
            yield Conversation("math", row["question"].strip(), text)


def standard_library_sources() -> list[str]:
    """Return the running interpreter's library modules (PSF licence), tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in sorted(root.rglob("*.py")):
        if any(folder in str(path) for folder in SKIPPED_FOLDERS):
            continue
        try:
            sources.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return sources


def python_functions(sources: list[str], max_chars: int = 700) -> Iterator[Conversation]:
    """Yield "complete this function" conversations from documented functions."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
                continue
            first_body = node.body[0]
            if len(node.body) < 2 or first_body.end_lineno is None or node.end_lineno is None:
                continue
            indent = len(lines[node.lineno - 1]) - len(lines[node.lineno - 1].lstrip())
            head = [line[indent:] for line in lines[node.lineno - 1 : first_body.end_lineno]]
            body = [line[indent:] for line in lines[first_body.end_lineno : node.end_lineno]]
            stub, rest = "\n".join(head), "\n".join(body).strip("\n")
            if not rest or len(stub) + len(rest) > max_chars:
                continue
            user = CODE_REQUEST + stub
            yield Conversation("code", user, f"```python\n{rest}\n```")


def load_conversations(gsm8k: Path, seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Return (training, held-out) conversations, shuffled with ``seed``."""
    rows = list(word_problems(gsm8k))
    rows += list(dict.fromkeys(python_functions(standard_library_sources())))
    random.Random(seed).shuffle(rows)
    return [r for r in rows if not r.is_held_out], [r for r in rows if r.is_held_out]
