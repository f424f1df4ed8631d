"""Keeps a sweep for the next start of the same engine on the same machine.

A file belongs to one fingerprint: everything that a step's time depends on. A file of another fingerprint,
or one that cannot be read, is no file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.coordinator.block_scheduler.cost_table import CostSample

logger = logging.getLogger(__name__)

FORMAT = 4


def cost_path(folder: Path, fingerprint: Mapping[str, object]) -> Path:
    """Return where the samples of an engine with this fingerprint are kept."""
    text = json.dumps({"format": FORMAT, **fingerprint}, sort_keys=True)
    return folder / f"costs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def save_samples(
    path: Path, fingerprint: Mapping[str, object], samples: Sequence[CostSample]
) -> None:
    """Write a sweep, whole or not at all; a folder that cannot be written costs the next start its sweep."""
    record = {"format": FORMAT, "fingerprint": fingerprint, "samples": samples}
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record, sort_keys=True), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("cannot keep measured step costs in %s: %s", path, error)


def load_samples(path: Path, fingerprint: Mapping[str, object]) -> list[CostSample] | None:
    """Return the samples of an earlier start, None when there are none for this fingerprint."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT or record["fingerprint"] != json.loads(
            json.dumps(fingerprint)
        ):
            return None
        samples = [CostSample(*sample) for sample in record["samples"]]
        if not samples or not all(map(_is_sound, samples)):
            raise ValueError("a sample is none")
        return samples
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s is no file of step costs (%s); they are measured again", path, error)
        return None


def _is_sound(sample: CostSample) -> bool:
    """Whether a step can have taken this."""
    others = (sample.context + 1, sample.other_width + 1, sample.tree_block + 1)
    counts = (sample.num_rows, sample.width, *others)
    times = (sample.draft_ms, sample.verify_ms, sample.step_ms)
    return (
        all(type(count) is int and 1 <= count < 1 << 40 for count in counts)
        and all(0.0 <= ms < math.inf for ms in times)
        and sample.verify_ms > 0.0
    )
