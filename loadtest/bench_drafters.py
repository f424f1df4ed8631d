"""A server's config with a drafter that needs no weights beside its own, so that a row can ask for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

NGRAM = "ngram"
OWN_ROWS = f"{NGRAM}=static:8"


@contextmanager
def with_ngram(config: Path) -> Iterator[Path]:
    """A copy of a ``serve run`` config whose applications serve prompt lookup too, for as long as it is used.

    One that has a drafter of that name is left as it is.
    """
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    for application in values["applications"]:
        model = application.setdefault("args", {}).setdefault("model", {})
        model.setdefault("drafters", {}).setdefault(NGRAM, NGRAM)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / config.name
        copy.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        yield copy
