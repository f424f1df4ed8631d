"""Steps of an installation run once, again when they change, and fail with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtest.peers import install
from loadtest.peers.install import InstallError, Step, llama_steps, run_steps, vllm_steps
from loadtest.peers.places import Places

pytestmark = pytest.mark.unit

PAIR = {"target": Path("/pair/target"), "drafter": Path("/pair/drafter")}


def append(path: Path, word: str) -> list[str]:
    code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    return [sys.executable, "-c", code, str(path), word]


def test_a_step_runs_again_only_when_it_or_its_inputs_change(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "source"
    source.write_text("1")
    step = Step("one", [append(out, "a")], inputs=[source])
    run_steps(tmp_path / "peer", [step])
    run_steps(tmp_path / "peer", [step])
    assert out.read_text() == "a"
    source.write_text("2")
    run_steps(tmp_path / "peer", [step])
    assert out.read_text() == "aa"
    run_steps(tmp_path / "peer", [Step("one", [append(out, "b")], inputs=[source])])
    assert out.read_text() == "aab"


def test_a_failed_step_says_why_and_is_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fail = [sys.executable, "-c", "import sys; print('first'); sys.exit('no space left')"]
    steps = [
        Step("one", [append(out, "a")]),
        Step("two", [fail]),
        Step("three", [append(out, "c")]),
    ]
    for _ in range(2):
        with pytest.raises(InstallError, match="no space left"):
            run_steps(tmp_path / "peer", steps)
    assert out.read_text() == "a"
    with pytest.raises(InstallError, match="no-such-program"):
        run_steps(tmp_path / "peer", [Step("four", [["no-such-program"]])])


def test_a_reason_is_kept_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(tmp_path)
    places.of("vllm").mkdir()
    failing = [Step("one", [["no-such-program"]])]
    monkeypatch.setattr(install, "vllm_steps", lambda _places: failing)
    assert "no-such-program" in (install.install("vllm", places, PAIR, 1) or "")
    assert "no-such-program" in (places.missing("vllm") or "")
    monkeypatch.setattr(install, "vllm_steps", lambda _places: [])
    assert "not installed" in (install.install("vllm", places, PAIR, 1) or "")


def test_peers_stay_out_of_this_environment(tmp_path: Path) -> None:
    places = Places(tmp_path)
    for step in [*vllm_steps(places), *llama_steps(places, PAIR, 2)]:
        for command in step.commands:
            if "install" in command and "pip" in command:
                assert command[0].startswith(str(tmp_path)), command


def test_uv_looks_where_pip_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    assert vllm_steps(Places(tmp_path))[1].environment["UV_FIND_LINKS"] == "/wheels"
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert "UV_FIND_LINKS" not in vllm_steps(Places(tmp_path))[1].environment
