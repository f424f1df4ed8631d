"""A rank that dies in the middle; apart from other tests: a process is in one group at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_process import split_verifier
from tiny_models import HIDDEN, save_target
from toy_grammars import toy_pool

from dflash_wire.errors import ExecutorLostError
from dflash_wire.records import DraftResult, Row, StepPlan

VOCAB = 32


def test_a_lost_rank_is_noticed_and_nothing_runs_after(tmp_path: Path) -> None:
    save_target(tmp_path, vocab_size=VOCAB)
    features = torch.zeros(64, HIDDEN)
    row = Row(0, [3, 1, 4], 0, [0], is_prefill=True)
    with split_verifier(tmp_path, features, 4, 4, toy_pool()) as verifier:
        verifier.engine.run(StepPlan(1, [row]), DraftResult(1, [[]]))
        (other,) = verifier.others
        other.kill()
        other.wait()
        for step_id, message in ((2, "is gone"), (3, "are being replaced")):
            with pytest.raises(ExecutorLostError, match=message):
                verifier.engine.run(StepPlan(step_id, [row]), DraftResult(step_id, [[]]))
