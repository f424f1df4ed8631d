"""The embedded drafter in every form that this repository writes, served in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_engines import END_OF_SEQUENCE, ROOT, Collector, encoded_prompts, run

from dflash_wire.errors import ConfigError
from dflash_wire.records import GenerationRequest
from drafter.checkpoint.__main__ import main as checkpoint
from gateway.coordinator import Coordinator
from services.local import build_local_ring
from services.spec import make_spec
from services.yaml_args import read_app_args

pytestmark = pytest.mark.unit

TARGET, DRAFTER = ROOT / "models/demo/target", ROOT / "models/demo/drafter"
CORPUS = ROOT / "loadtest/prompts/word_problems.jsonl"


def answers_with(drafter: Path) -> list[tuple[list[int], list[int]]]:
    """Tokens, and committed tokens per cycle, of two prompts."""
    args = read_app_args(ROOT / "config.yaml")
    model = args.model.model_copy(update={"drafter": str(drafter)})
    ring, limits = build_local_ring(make_spec(args.model_copy(update={"model": model})))
    sink = Collector()
    coordinator = Coordinator(ring, sink, limits, "static:8", cohorts=(1,))
    requests = [
        GenerationRequest(f"r{i}", prompt, 60, stop_token_ids=[END_OF_SEQUENCE])
        for i, prompt in enumerate(encoded_prompts("word_problems")[:2])
    ]
    run(coordinator, requests, 2)
    return [
        (
            sink.tokens(request.request_id),
            [c.cycle.num_committed for c in sink.chunks[request.request_id] if c.cycle],
        )
        for request in requests
    ]


def test_layouts_draft_the_same(tmp_path: Path) -> None:
    expected = answers_with(DRAFTER)
    assert max(expected[0][1]) > 2
    target = ["--target", str(TARGET)]
    for source, layout in ((DRAFTER, "speculators"), (tmp_path / "speculators", "z-lab")):
        arguments = ["convert", str(source), str(tmp_path / layout), "--layout", layout]
        assert checkpoint([*arguments, *target]) == 0
        assert answers_with(tmp_path / layout) == expected


def test_a_draft_vocabulary_changes_no_token(tmp_path: Path) -> None:
    expected = answers_with(DRAFTER)
    options = ["--target", str(TARGET), "--size", "300", "--corpus", str(CORPUS)]
    assert checkpoint(["trim", str(DRAFTER), str(tmp_path / "small"), *options]) == 0
    found = answers_with(tmp_path / "small")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert max(found[0][1]) > 1


def test_another_targets_drafter_does_not_start(tmp_path: Path) -> None:
    """Of a target whose depth it does not tell, its taps still do."""
    assert (
        checkpoint(["convert", str(DRAFTER), str(tmp_path / "a"), "--layout", "speculators"]) == 0
    )
    config = (tmp_path / "a" / "config.json").read_text()
    (tmp_path / "a" / "config.json").write_text(config.replace("    10\n  ]", "    12\n  ]"))
    with pytest.raises(
        ConfigError, match="taps layer 11, but the target's last tappable layer is 10"
    ):
        answers_with(tmp_path / "a")
