"""The prompt sets that come with the repository, and two public ones when a folder has them.

``DFLASH_DATA`` names a folder with ``gsm8k_dev.jsonl`` and ``humaneval.jsonl``; without it a folder
``shared/data`` beside the checkout is looked for. Neither is ever needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "prompts"
OWN_SETS = ("word_problems", "code_stubs", "chat", "long_inputs")
PUBLIC_SETS = ("gsm8k", "humaneval")
DATA_VARIABLE = "DFLASH_DATA"
CODE_REQUEST = "Complete this Python function:\n"


@dataclass(frozen=True)
class Prompt:
    """One conversation to complete."""

    prompt_id: str
    kind: str
    messages: list[dict[str, str]]


def data_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of public prompt sets, or None when there is none."""
    named = (os.environ if environment is None else environment).get(DATA_VARIABLE)
    folder = Path(named) if named else FOLDER.parents[2] / "shared" / "data"
    return folder if folder.is_dir() else None


def available_sets() -> list[str]:
    """Names that ``load`` takes here: ours, then the public ones whose file is there."""
    folder = data_folder()
    return list(OWN_SETS) + [
        name for name in PUBLIC_SETS if folder is not None and _public_file(folder, name).is_file()
    ]


def load(names: str, limit: int | None = None) -> list[Prompt]:
    """Load prompt sets, in order.

    Args:
        names: set names separated by commas; ``all`` stands for our own sets, ``mixed`` for one
            prompt of each of our sets in turn.
        limit: keep at most this many prompts.

    Raises:
        ValueError: a name is unknown, or its file is not here.
    """
    if names == "mixed":
        prompts = interleave([_load_own(name) for name in OWN_SETS])
    else:
        chosen = list(OWN_SETS) if names == "all" else [n.strip() for n in names.split(",")]
        prompts = [prompt for name in chosen for prompt in _load_set(name)]
    return prompts if limit is None else prompts[:limit]


def _load_set(name: str) -> list[Prompt]:
    if name in OWN_SETS:
        return _load_own(name)
    known = ", ".join([*OWN_SETS, *PUBLIC_SETS, "all", "mixed"])
    if name not in PUBLIC_SETS:
        raise ValueError(f"unknown prompt set {name!r}; known are {known}")
    folder = data_folder()
    if folder is None or not _public_file(folder, name).is_file():
        raise ValueError(
            f"prompt set {name!r} needs {_public_file(Path(), name)}: "
            f"set {DATA_VARIABLE} to the folder that has it"
        )
    return [_public_prompt(name, i, row) for i, row in enumerate(_rows(_public_file(folder, name)))]


def _load_own(name: str) -> list[Prompt]:
    return [
        Prompt(row["id"], row["kind"], row["messages"]) for row in _rows(FOLDER / f"{name}.jsonl")
    ]


def _public_file(folder: Path, name: str) -> Path:
    return folder / {"gsm8k": "gsm8k_dev.jsonl", "humaneval": "humaneval.jsonl"}[name]


def _public_prompt(name: str, index: int, row: dict[str, Any]) -> Prompt:
    if name == "gsm8k":
        prompt_id, kind, text = f"gsm8k-{index:03d}", "word_problem", row["question"]
    else:
        prompt_id, kind, text = row["task_id"], "code_stub", CODE_REQUEST + row["prompt"].rstrip()
    return Prompt(prompt_id, kind, [{"role": "user", "content": text}])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def interleave(sets: list[list[Prompt]]) -> list[Prompt]:
    """One prompt of each set in turn, until all are used up."""
    longest = max(len(prompts) for prompts in sets)
    return [prompts[i] for i in range(longest) for prompts in sets if i < len(prompts)]
