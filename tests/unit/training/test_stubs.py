"""Generated function heads: valid Python, varied, a function of the seed, made of training text only."""

from __future__ import annotations

import ast
import random

from drafter.training.demo.corpus import CODE_REQUEST, Conversation
from drafter.training.demo.stubs import StubPools, code_stubs, write_stub

ROWS = [
    Conversation(
        "math", "Tom has 3 apples and buys 4 more of them. How many apples does he have now?", ""
    ),
    Conversation(
        "code",
        "Complete this Python function:\ndef read_chunk(self, path, size=1, *, mode: str):\n"
        '    """Return the next chunk of a file.\n\n'
        '    Short. It raises an error when the file is closed already.\n    """',
        "",
    ),
    Conversation(
        "code",
        'def merge_sorted(left, right):\n    """Merge two sorted lists into one list."""',
        "",
    ),
]


def test_pools_hold_names_and_whole_sentences_of_the_conversations() -> None:
    pools = StubPools.of(ROWS)
    assert pools.words == ["chunk", "merge", "read", "sorted"]
    assert pools.parameters == ["left", "mode", "path", "right", "size"]
    assert "Merge two sorted lists into one list." in pools.sentences
    assert "How many apples does he have now?" in pools.sentences
    assert not any(sentence.startswith("Short") for sentence in pools.sentences)


def test_stubs_are_python() -> None:
    pools, rng = StubPools.of(ROWS), random.Random(1)
    stubs = [write_stub(pools, rng) for _ in range(300)]
    for stub in stubs:
        functions = [n for n in ast.parse(stub).body if isinstance(n, ast.FunctionDef)]
        assert len(functions) == 1
        assert ast.get_docstring(functions[0])
    assert any(">>>" in stub for stub in stubs)
    assert any("List[int]" in stub for stub in stubs)
    assert len(set(stubs)) == len(stubs)


def test_stubs_are_prompts_without_answers_and_a_function_of_the_seed() -> None:
    stubs = code_stubs(ROWS, 5, 7)
    assert stubs == code_stubs(ROWS, 5, 7) != code_stubs(ROWS, 5, 8)
    assert all(stub.user.startswith(CODE_REQUEST) and stub.assistant == "" for stub in stubs)
