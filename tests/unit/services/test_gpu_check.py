"""The GPU check on a CPU: every part that needs no card, and what becomes of a run that goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_check import __main__ as gpu_check
from services.gpu_check.floors import floor_of
from services.gpu_check.report import PartResult, Report, render
from services.gpu_check.session import Ceilings, NotHereError, Session
from services.gpu_check.shapes import DRY, FULL

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
NOT_THERE = ("ray", "zmq", "pydantic", "fastapi", "xgrammar", "grpc")
"""A machine with a GPU may have none of these."""
WITHOUT_THEM = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({NOT_THERE!r}))
sys.argv = ["gpu_check", "--dry-run", "--output", sys.argv[1], "--parts", *sys.argv[2:]]
runpy.run_module("services.gpu_check", run_name="__main__")
"""
SKIPPED_ON_A_CPU = {"without_graphs", "ray_features"}


def dry_run(output: Path, *parts: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THEM, str(output), *parts],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stderr, file=sys.stderr)
    return done.returncode, done.stdout


def test_a_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    """With nothing installed but torch, transformers and msgpack; two processes included."""
    output = tmp_path / "check.jsonl"
    code, text = dry_run(output, *(name for name in gpu_check.PARTS if name != "dflash_package"))
    assert code == 0, text
    summary = json.loads(text.splitlines()[-1])
    assert summary["is_sound"] and summary["is_dry_run"]
    found = {part["name"]: part for part in summary["parts"]}
    assert {n for n, p in found.items() if p["status"] == "skipped"} == SKIPPED_ON_A_CPU
    assert {p["status"] for p in found.values()} == {"done", "skipped"}
    assert len(found["verify"]["rows"]) == len(DRY.widths) * len(DRY.rows) * len(DRY.contexts)
    checks = [check for part in found.values() for check in part["checks"]]
    assert all(check["is_met"] for check in checks if not check["is_design"])
    targets = [check for check in checks if check["is_design"]]
    assert [check["bound"] for check in targets] == [1.25, 1.5, 1.1, 1.3]
    assert all(check["is_met"] is None for check in targets), "a CPU says nothing about these"
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[0]["shape"] == DRY.name and lines[1:] == summary["parts"]


def test_a_part_that_fails_loses_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(session: Session, part: PartResult) -> None:
        part.add(found="before it failed")
        raise RuntimeError("no such kernel")

    def missing(session: Session, part: PartResult) -> None:
        raise NotHereError("nothing of the kind")

    def works(session: Session, part: PartResult) -> None:
        part.must("a figure", 1.0, 2.0)

    parts = {"fails": fails, "missing": missing, "works": works}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    report = Report(tmp_path / "out.jsonl", {"device": "none"})
    gpu_check.run_parts(parts, Session(DRY, torch.device("cpu"), 60), report)
    assert [part.status for part in report.parts] == ["failed", "skipped", "done"]
    assert report.parts[0].rows == [{"found": "before it failed"}]
    assert report.parts[0].reason == "RuntimeError: no such kernel"
    assert not report.is_sound
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 4


@pytest.fixture
def own_handler() -> Iterator[None]:
    """The signal means what it meant before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_run_that_is_told_to_end_keeps_what_it_had_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_handler: None,
) -> None:
    def told_to_end(session: Session, part: PartResult) -> None:
        part.add(found=1)
        with suppress(Exception):  # as a part may that tries several things
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    parts = {"first": told_to_end, "second": told_to_end}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry-run", "--output", str(output)])
    assert gpu_check.main() == 128 + signal.SIGTERM
    text = capsys.readouterr().out
    assert "Cut off: the run was told to end" in text
    summary = json.loads(text.splitlines()[-1])
    assert summary["is_cut_off"] and not summary["is_sound"]
    (_, part) = [json.loads(line) for line in output.read_text().splitlines()]
    assert (part["status"], part["reason"], part["rows"]) == (
        "cut off",
        "the run was told to end",
        [{"found": 1}],
    )


def test_a_signal_between_parts_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_handler: None
) -> None:
    class Signalled(Report):
        def add(self, part: PartResult) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().add(part)

    session = Session(DRY, torch.device("cpu"), 60)
    signal.signal(signal.SIGTERM, session.ending)
    monkeypatch.setattr(gpu_check, "PARTS", {"first": lambda *_: None, "second": lambda *_: None})
    report = Signalled(tmp_path / "out.jsonl", {})
    gpu_check.run_parts(["first", "second"], session, report)
    assert [(part.name, part.status) for part in report.parts] == [("first", "done")]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert report.is_cut_off and not report.is_sound


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_handler: None,
) -> None:
    monkeypatch.setattr(gpu_check, "PARTS", {"one": lambda *_: pytest.fail("it was measured")})
    (tmp_path / "file").touch()
    for output in (tmp_path, tmp_path / "file" / "out.jsonl"):
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry-run", "--output", str(output)])
        assert gpu_check.main() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: results cannot be kept in {output}: ")


def test_parts_bring_what_they_need(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_handler: None,
) -> None:
    arguments = ["gpu_check", "--dry-run", "--output", str(tmp_path / "out"), "--parts"]
    monkeypatch.setattr(sys, "argv", [*arguments, "draft"])
    assert gpu_check.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    assert [(p["name"], p["status"]) for p in found] == [("ceilings", "done"), ("draft", "done")]
    assert gpu_check.with_needed(["trees", "graphs"]) == ["trees", "graphs"]
    assert gpu_check.with_needed(["trees", "cycles", "ceilings"]) == ["ceilings", "trees", "cycles"]
    assert gpu_check.with_needed(gpu_check.PARTS) == list(gpu_check.PARTS)


def test_parts_end_when_the_time_is_over(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.jsonl", {})
    gpu_check.run_parts(["ceilings"], Session(DRY, torch.device("cpu"), 0.0), report)
    assert report.parts[0].status == "cut off" and report.is_sound


def test_a_bound_that_is_missed_makes_a_run_unsound_and_a_target_does_not(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.jsonl", {})
    part = PartResult("one")
    part.aim("slow", 2.0, 1.5, is_judged=True)
    report.add(part)
    assert report.is_sound
    part.must("differs", 0.1, 0.0)
    assert not report.is_sound
    assert render(part).splitlines()[2:] == [
        "  MISSED     slow: 2 (target 1.5)",
        "  MISSED     differs: 0.1 (bound 0)",
    ]


def test_without_a_gpu_there_is_nothing_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path / "x")])
    assert gpu_check.main() == 2
    assert not (tmp_path / "x").exists()


class Sizes:
    """What floors ask a pair, without its weights."""

    shape = FULL

    class borrowed:
        head = torch.empty(151936, 4096, dtype=torch.bfloat16, device="meta")

    def parameter_bytes(self, part: str) -> int:
        from services.gpu_check.pair import RandomPair

        return RandomPair.parameter_bytes(self, part)  # type: ignore[arg-type]


def test_floors_of_the_full_shape() -> None:
    """7.57 billion parameters are read per verify pass, 15.1 GB; at 4 TB/s that takes 3.8 ms."""
    pair: Any = Sizes()
    ceilings = Ceilings(4e9, 800e9)
    one = floor_of(pair, ceilings, "verify", 1, 1, 1024)
    assert pair.parameter_bytes("verify") == 2 * (36 * 192_937_984 + 151936 * 4096)
    assert one.bytes_ms == pytest.approx((15.136e9 + 1024 * 147456) / 4e9, rel=1e-3)
    assert one.ms == one.bytes_ms > one.flops_ms
    many = floor_of(pair, ceilings, "verify", 16, 32, 1024)
    products = 2 * 512 * (36 * 192_937_984 + 151936 * 4096)
    attention = 512 * 1024 * 4 * 36 * 4096  # of 32 heads of 128, with the context and back
    assert many.flops_ms == pytest.approx((products + attention) / 800e9)
    assert many.ms == many.flops_ms > many.bytes_ms
    draft = floor_of(pair, ceilings, "draft", 16, 1, 1024)
    assert draft.bytes_ms < one.bytes_ms / 4
