"""What drafts in a server's config, and the config with a drafter beside it that needs no weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

NGRAM = "ngram"
NO_DRAFTER = "none"
OWN_ROWS = f"{NGRAM}=static:8"
DFLASH = "DFlashDraftModel"
"""Architecture of the drafters that the public package's loop can run."""


@contextmanager
def with_ngram(config: Path) -> Iterator[Path]:
    """A copy of a ``serve run`` config whose applications serve prompt lookup too, for as long as it is used.

    One that has a drafter of that name is left as it is.
    """
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    for model in _models(values):
        model.setdefault("drafters", {}).setdefault(NGRAM, NGRAM)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / config.name
        copy.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        yield copy


def has_dflash(config: Path) -> bool:
    """Whether the default drafter of a ``serve run`` config is, or may be, a DFlash checkpoint.

    A config that names no drafter serves the embedded one, which is; what a hub id stands for is not known.
    """
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    drafters = [model.get("drafter") for model in _models(values)]
    return all(drafter is None or _may_be_dflash(drafter) for drafter in drafters)


def _may_be_dflash(drafter: str) -> bool:
    file = Path(drafter) / "config.json"
    if not file.is_file():
        return drafter not in (NGRAM, NO_DRAFTER)
    return DFLASH in json.loads(file.read_text(encoding="utf-8")).get("architectures", ())


def _models(values: Any) -> list[dict[str, Any]]:
    """The ``model`` sections of a config, made where they are missing."""
    return [
        application.setdefault("args", {}).setdefault("model", {})
        for application in values["applications"]
    ]
