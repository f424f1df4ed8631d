"""Rows, padding and the order of batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_wire.errors import ConfigError
from drafter.training.data import BatchPlan, TrainingRow, collate, parse_row, read_rows


def test_both_forms_of_a_row_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"prompt_ids": [5], "response_ids": [6, 7], "temperature": 0.7},
        {"prompt_ids": [5], "response_ids": [6]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    row = TrainingRow([5, 6, 7], [False, True, True])
    assert read_rows(file, 10) == [row, row]  # one supervised token teaches nothing


@pytest.mark.parametrize(
    "line", ["{", '{"input_ids": [1], "loss_mask": []}', '{"text": "a"}', "[]"]
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt_ids": [1], "response_ids": [2, 3]}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_rows(file, 10)


def test_rows_are_cut_to_max_length() -> None:
    row = parse_row({"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}, 4)
    assert row == TrainingRow([1, 2, 3, 4], [False, False, True, True])
    assert parse_row({"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}, 3) is None


def test_padding_is_never_supervised() -> None:
    rows = [TrainingRow([5, 6, 7], [False, True, True]), TrainingRow([8, 9], [True, True])]
    batch = collate(rows, [1, 0])
    assert batch.input_ids.tolist() == [[8, 9, 0], [5, 6, 7]]
    assert batch.loss_mask.tolist() == [[True, True, False], [False, True, True]]
    assert batch.lengths.tolist() == [2, 3]


def test_every_epoch_visits_every_row_once_in_another_order() -> None:
    lengths = [10 + (i * 7) % 90 for i in range(60)]
    plan = BatchPlan(lengths, 400, seed=3)
    epochs = [plan.epoch(i) for i in range(3)]
    for groups in epochs:
        assert sorted(i for group in groups for i in group) == list(range(60))
        assert all(max(lengths[i] for i in g) * len(g) <= 400 for g in groups)
    assert epochs[0] != epochs[1]
    assert BatchPlan(lengths, 400, seed=3).epoch(1) == epochs[1]


def test_locate_inverts_counting() -> None:
    plan = BatchPlan([20] * 30 + [90] * 5, 200, seed=0)
    walked = [(e, i) for e in range(3) for i in range(len(plan.epoch(e)))]
    assert [plan.locate(step) for step in range(len(walked))] == walked
    assert plan.num_steps(3) == len(walked)
