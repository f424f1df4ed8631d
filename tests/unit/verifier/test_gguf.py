"""A GGUF file becomes an ordinary target, tensor by tensor and token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import CONTROL, TOKENS, save_gguf
from tiny_models import generate_greedy
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from verifier_harness import Harness

from dflash_wire.errors import InvalidRequestError
from gateway.chat_tokenizer import ChatTokenizer
from verifier import gguf

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]

PROMPT = [2, 7, 3, 60, 21, 21, 0, 44, 13, 9, 30]
NUM_NEW = 20
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return file, save_gguf(file)


def test_tensors_are_what_the_file_stands_for(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    file, expected = saved
    count = gguf.convert(file, tmp_path / "exact", torch.float32)
    written = load_file(tmp_path / "exact" / "model.safetensors")
    assert count == sum(tensor.numel() for tensor in expected.values())
    assert written.keys() == expected.keys()
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "exact").iterdir()}
    assert modes == {0o044}, "not everybody can read all files"
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=0)
    gguf.convert(file, tmp_path / "rounded", torch.bfloat16)
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(rounded[name], tensor.bfloat16(), rtol=0, atol=0)


def test_decoding_equals_transformers_on_the_file_itself(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Beyond the window, so that kinds of layers and their rotations matter."""
    file, _ = saved
    gguf.convert(file, tmp_path / "target", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    model.generation_config.eos_token_id = None
    harness = Harness(tmp_path / "target", [0, 3])
    lane = harness.lane(PROMPT)
    harness.prefill(lane)
    harness.decode(lane, NUM_NEW - 1)
    expected = generate_greedy(model, PROMPT, NUM_NEW)
    assert len(set(expected)) > 4
    assert lane.token_ids == PROMPT + expected


def test_the_tokenizer_comes_along(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    out = tmp_path / "target"
    assert gguf.main([str(saved[0]), str(out), "--chat-template", str(template)]) == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    names = tokenizer.convert_ids_to_tokens(tokenizer("ab ab  b<end_of_turn>")["input_ids"])
    assert names == ["<bos>", "ab", "▁ab", "▁▁", "b", "<end_of_turn>"]
    assert tokenizer.decode([TOKENS.index("▁ab"), CONTROL.index("<end_of_turn>")], True) == " ab"
    messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<bos>ab"
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == CONTROL.index("<eos>")


def test_the_shipped_template_writes_transcripts(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    template = (ROOT / "configs/transcript.jinja").read_text(encoding="utf-8")
    gguf.convert(saved[0], tmp_path / "target", torch.bfloat16, template)
    tokenizer = ChatTokenizer.load(tmp_path / "target")
    turns = [("system", "Short answers."), ("user", "Hi "), ("assistant", "Yes."), ("user", "2?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.render(messages) == (
        "<bos>Short answers.\n\nUser:\nHi\n\nAssistant:\nYes.\n\nUser:\n2?\n\nAssistant:\n"
    )
    assert tokenizer.render(messages[1:2], begins_answer=False) == (
        "<bos>A conversation between a user and a helpful assistant.\n\nUser:\nHi"
    )
    for refused in (messages[::-1], [{"role": "tool", "content": "4"}]):
        with pytest.raises(InvalidRequestError, match="turns of user and assistant"):
            tokenizer.render(refused)


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages | no_filter }}", "{% for x in y %}"])
def test_a_template_that_is_no_jinja_is_refused_before_the_file_is_read(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jinja, file = tmp_path / "template.jinja", tmp_path / "broken.gguf"
    jinja.write_text(template)
    file.write_bytes(b"not a model")
    said = refusal(file, tmp_path / "out", capsys, "--chat-template", str(jinja))
    assert said.startswith("error: the chat template is no Jinja: ")


def test_a_files_own_template_must_be_jinja(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, jinja = tmp_path / "own.gguf", tmp_path / "template.jinja"
    save_gguf(file, chat_template="{% if %}")
    said = refusal(file, tmp_path / "out", capsys)
    assert f"the chat template of {file} (--chat-template names another) is no Jinja" in said
    jinja.write_text(TEMPLATE)
    assert gguf.main([str(file), str(tmp_path / "out"), "--chat-template", str(jinja)]) == 0


def refusal(file: Path, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The message of a conversion that must leave nothing behind."""
    before = sorted(out.parent.iterdir())
    assert gguf.main([str(file), str(out), *options]) == 1
    assert sorted(out.parent.iterdir()) == before
    return capsys.readouterr().err


def test_what_cannot_be_served_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    saved: tuple[Path, dict[str, Tensor]],
) -> None:
    out = tmp_path / "out" / "target"
    out.parent.mkdir()
    assert "there is no file" in refusal(tmp_path / "none.gguf", out, capsys)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    assert "no GGUF file" in refusal(broken, out, capsys)
    broken.write_bytes(saved[0].read_bytes()[:3000])
    assert "no GGUF file" in refusal(broken, out, capsys)
    binary = ("--chat-template", str(saved[0]))
    assert "can't decode" in refusal(saved[0], out, capsys, *binary)
    out.symlink_to("nowhere")
    assert "is there already" in refusal(tmp_path / "broken.gguf", out, capsys), "not at once"
    out.unlink()
    save_gguf(broken, architecture="gemma2")
    assert "'gemma2' is not supported" in refusal(broken, out, capsys)
    save_gguf(broken, leaves_out="model.layers.1.mlp.up_proj.weight")
    assert "lacks 1 tensors of its model, as model.layers.1.mlp.up_proj.weight" in refusal(
        broken, out, capsys
    )
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "find_spec", lambda name: None)
        assert "pip install accelerate gguf" in refusal(saved[0], out, capsys)
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError("full")))
        assert "full" in refusal(saved[0], out, capsys)
    out.mkdir()
    assert "is there already" in refusal(saved[0], out, capsys)
