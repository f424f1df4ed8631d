"""Costs are measured once per engine and machine, kept, and never taken from another engine."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_wire.ports import EngineLimits
from dflash_wire.records import StepPlan, StepResult
from gateway.coordinator.block_scheduler.cost_table import CostSample
from gateway.coordinator.block_scheduler.sweep import sweep
from services import step_costs
from services.config import AppArgs
from services.spec import make_spec
from services.step_costs import measured_samples, scheduler_for

pytestmark = pytest.mark.unit

LIMITS = EngineLimits(
    num_pages=64,
    page_size=16,
    max_step_positions=64,
    max_rows=4,
    max_context=512,
    max_draft_block_size=8,
)


class CountingRing:
    """Answers every step at once."""

    def __init__(self) -> None:
        self.num_steps = 0

    def send(self, plan: StepPlan) -> None:
        self.num_steps += 1

    def receive(self, step_id: int) -> StepResult:
        return StepResult(step_id, [], 0.1, 0.2)


class OtherRing(CountingRing):
    """Another way around the executors."""


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, dict[str, Any]]:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return {
        "model": {"target": str(tmp_path / "target"), "drafter": str(tmp_path / "drafter")},
        "block_scheduler": {"cost_folder": str(tmp_path / "costs"), "draft_widths": [2, 8]},
    }


def started(
    sections: dict[str, dict[str, Any]], ring: CountingRing | None = None, **changes: Any
) -> tuple[int, list[CostSample]]:
    """Start once with some keys changed: how many steps were measured, and the samples."""
    ring = ring or CountingRing()
    changed = {name: {**sections.get(name, {}), **new} for name, new in changes.items()}
    args = AppArgs.model_validate({**sections, **changed})
    samples = measured_samples(args, make_spec(args), ring, LIMITS)
    return ring.num_steps, samples


def test_the_second_start_measures_nothing(
    sections: dict[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    num_steps, samples = started(sections)
    assert num_steps > len(samples) > 0
    assert "none are kept in" in caplog.text and "steps measured in" in caplog.text
    caplog.clear()
    assert started(sections) == (0, samples)
    assert f"{len(samples)} samples out of {sections['block_scheduler']['cost_folder']}" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("dtype", {"model": {"dtype": "bfloat16"}}),
        ("threads", {"verifier": {"num_threads": 2}}),
        ("draft_widths", {"block_scheduler": {"draft_widths": [4]}}),
        ("limits", {"engine": {"max_rows": 8}}),
        ("link", {"link": {"spin_ms": 1}}),
        ("layout", {"ring": OtherRing()}),
    ],
)
def test_costs_of_another_engine_are_refused_and_measured_anew(
    sections: dict[str, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    key: str,
    changes: dict[str, Any],
) -> None:
    caplog.set_level(logging.INFO)
    started(sections)
    num_steps, _ = started(sections, **changes)
    assert num_steps > 0
    assert f"are of another {key}\n" in caplog.text
    assert started(sections)[0] == 0, "the first engine's costs are still there"


def test_a_changed_model_is_another(
    sections: dict[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    started(sections)
    (Path(sections["model"]["drafter"]) / "config.json").write_text('{"layers": 2}')
    assert started(sections)[0] > 0
    assert "are of another models\n" in caplog.text


def test_a_file_that_was_tampered_with_is_refused(
    sections: dict[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    started(sections)
    (path,) = Path(sections["block_scheduler"]["cost_folder"]).iterdir()
    kept = json.loads(path.read_text())
    kept["fingerprint"]["device"] = "another"
    path.write_text(json.dumps(kept))
    assert started(sections)[0] > 0
    assert "are of another device\n" in caplog.text
    path.write_text("{")
    assert started(sections)[0] > 0


@pytest.mark.parametrize(("num_steps", "is_used"), [(8, False), (9, True), (30, True)])
def test_half_a_sweep_is_used_where_it_has_all_numbers_of_rows_and_not_kept(
    sections: dict[str, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    num_steps: int,
    is_used: bool,
) -> None:
    """Plain decoding and two widths at 1, 2 and 4 rows are nine kinds of step."""
    ring = CountingRing()
    clocked = partial(sweep, clock=lambda: float(ring.num_steps))
    monkeypatch.setattr(step_costs, "sweep", clocked)
    taken, samples = started(sections, ring, block_scheduler={"sweep_s": num_steps})
    assert taken == num_steps
    assert {(s.num_rows, s.width) for s in samples} == (
        {(rows, width) for rows in (1, 2, 4) for width in (1, 2, 8)} if is_used else set()
    )
    assert ("not all measured, so not kept" if is_used else "the table decides") in caplog.text
    assert not Path(sections["block_scheduler"]["cost_folder"]).exists()


def test_a_sweep_without_time_is_not_used(
    sections: dict[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    num_steps, _ = started(sections, block_scheduler={"sweep_s": 1e-9})
    assert num_steps <= 1
    assert "raise block_scheduler.sweep_s" in caplog.text
    assert not Path(sections["block_scheduler"]["cost_folder"]).exists()


def test_the_sweep_can_be_left_out(
    sections: dict[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert started(sections, block_scheduler={"sweep_s": 0}) == (0, [])
    assert "the table decides" in caplog.text
    _, samples = started(sections)
    assert started(sections, block_scheduler={"sweep_s": 0}) == (0, samples), (
        "kept ones still count"
    )


@pytest.mark.parametrize("folder", [None, "~nobody-has-this-name/costs"])
def test_without_a_folder_every_start_measures(
    sections: dict[str, dict[str, Any]], folder: str | None
) -> None:
    for _ in range(2):
        num_steps, samples = started(sections, block_scheduler={"cost_folder": folder})
        assert num_steps > 0 and samples


def test_the_default_folder_is_the_users(
    sections: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    del sections["block_scheduler"]["cost_folder"]
    started(sections)
    (path,) = (tmp_path / "home/.cache/dflash/step-costs").iterdir()
    assert path.name.startswith("costs-")
    assert started(sections)[0] == 0


def test_a_scheduler_without_prices_follows_the_table(sections: dict[str, dict[str, Any]]) -> None:
    args = AppArgs.model_validate(sections)
    assert scheduler_for(args, LIMITS, []).cost is None
    ragged = CostSample(4, 1, 512, 0.0, 1.0, 2.0, other_width=2)
    assert scheduler_for(args, LIMITS, [ragged]).cost is None
    assert scheduler_for(args, LIMITS, started(sections)[1]).cost is not None
