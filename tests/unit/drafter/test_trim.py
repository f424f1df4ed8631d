"""A draft vocabulary: how it is chosen, what is written, and what the engine drafts with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_helpers import (
    CPU,
    HIDDEN,
    MASK_ID,
    NUM_TARGET_LAYERS,
    VOCAB,
    draft_config,
    ingest_plan,
    make_engine,
    page_tables,
    random_weights,
    run_with_logits,
    save_random_draft,
    verify_row,
)
from tiny_models import save_target
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from dflash_wire.errors import ConfigError
from dflash_wire.records import StepPlan
from dflash_wire.sampling import SamplingParams
from drafter.borrowed import load_borrowed_weights
from drafter.checkpoint import SPECULATORS, Z_LAB, read_checkpoint, write_checkpoint
from drafter.checkpoint.__main__ import main
from drafter.checkpoint.frequencies import count_tokens
from drafter.checkpoint.trim import ending_tokens, frequent_tokens, trimmed
from drafter.engine import DrafterEngine

pytestmark = pytest.mark.unit

KEPT = torch.tensor([2, 3, 11, 17, 18, 40, 41, 62])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_random_draft(tmp_path / "drafter", draft_config())
    return tmp_path / "drafter"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Words w0 to w62 are tokens 0 to 62."""
    save_target(tmp_path / "target", num_layers=NUM_TARGET_LAYERS, vocab_size=VOCAB)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "target" / "tokenizer.json"))
    (tmp_path / "target" / "generation_config.json").write_text('{"eos_token_id": [60, 61]}')
    return tmp_path / "target"


def write_lines(file: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return file


def test_frequent_tokens() -> None:
    counts = torch.tensor([5, 0, 7, 5, 9, 0])
    assert frequent_tokens(counts, 3).tolist() == [0, 2, 4]
    assert frequent_tokens(counts, 4).tolist() == [0, 2, 3, 4]
    assert frequent_tokens(counts, 3, always={5}, never={4}).tolist() == [0, 2, 5]
    assert frequent_tokens(counts, 6).tolist() == list(range(6))
    for size in (7, 1):
        with pytest.raises(ConfigError, match=f"of {size} tokens out of 6 is not possible"):
            frequent_tokens(counts, size, always={4, 5})


def test_corpus_forms(tmp_path: Path, target: Path) -> None:
    lines = write_lines(
        tmp_path / "a.jsonl",
        {"response_ids": [1, 1, 2], "text": "w9"},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"messages": [{"role": "user", "content": "w3 w3"}, {"role": "x", "content": None}]},
        {"question": "w4", "answer": "w8 w8 w8"},
    )
    text = write_lines(tmp_path / "b.txt", "w10 w11", "w10")
    counts = count_tokens([lines, text], target, VOCAB)
    expected = {1: 2, 2: 1, 6: 1, 7: 1, 3: 2, 4: 1, 8: 3, 10: 2, 11: 1}
    assert {i: int(n) for i, n in enumerate(counts) if n} == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not an object"),
        ({"id": 4}, "has none of response_ids, input_ids, messages, text"),
        ({"response_ids": [VOCAB]}, "outside the vocabulary of 64"),
        ({"text": ""}, "the corpus has no tokens"),
    ],
)
def test_corpora_that_are_wrong(
    tmp_path: Path, target: Path, line: dict[str, Any] | str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        count_tokens([write_lines(tmp_path / "a.jsonl", line)], target, VOCAB)


def test_a_target_that_is_none(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    assert main(["inspect", str(path), "--target", str(tmp_path)]) == 1
    assert "config.json is missing" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"hidden_size": 32, "text_config": {"vocab_size": 3}}')
    assert main(["inspect", str(path), "--target", str(tmp_path)]) == 1
    assert "has no hidden_size, num_hidden_layers" in capsys.readouterr().err


def test_endings(target: Path, tmp_path: Path) -> None:
    assert ending_tokens(target) == {60, 61}
    assert ending_tokens(tmp_path) == set()


def save_trimmed(path: Path, out: Path) -> DrafterEngine:
    write_checkpoint(trimmed(read_checkpoint(path), KEPT), out, Z_LAB)
    return make_engine(out)


def drafts_and_logits(
    engine: DrafterEngine, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> tuple[list[list[int]], Tensor]:
    (pages,) = page_tables(1)
    engine.run(ingest_plan(0, 8, 0, pages))
    row = verify_row(5, 8, pages, 16, sampling)
    return run_with_logits(engine, StepPlan(1, [row]), monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_are_the_whole_heads_where_they_are(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    sampling = SamplingParams(temperature, seed=4)
    _, whole = drafts_and_logits(make_engine(path), monkeypatch, sampling)
    engine = save_trimmed(path, tmp_path / "small")
    (drafts,), logits = drafts_and_logits(engine, monkeypatch, sampling)
    torch.testing.assert_close(logits[:, KEPT], whole[:, KEPT])
    others = [i for i in range(VOCAB) if i not in KEPT.tolist()]
    assert (logits[:, others] == -torch.inf).all()
    assert set(drafts) <= set(KEPT.tolist()) and len(set(drafts)) > 1
    if temperature == 0:
        assert drafts == KEPT[whole[:, KEPT].argmax(1)].tolist()


def test_trees_of_a_draft_vocabulary(path: Path, tmp_path: Path) -> None:
    engine = save_trimmed(path, tmp_path / "small")
    row = verify_row(5, 0, [0], 30)
    row.draft_width, row.is_tree = 4, True
    result = engine.run(StepPlan(0, [row]))
    assert len(result.draft_token_ids[0]) == 29
    assert set(result.draft_token_ids[0]) <= set(KEPT.tolist())


def test_command(path: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    corpus = write_lines(tmp_path / "c.txt", "w1 w1 w2 w2 w3 w4 w63 w63 w63")
    small = tmp_path / "small"
    common = ["--target", str(target)]
    arguments = ["trim", str(path), str(small), *common, "--size", "5", "--corpus", str(corpus)]
    assert main(arguments) == 0
    assert "5 of 64 tokens, 55.56% of the corpus" in capsys.readouterr().out
    tensors = read_checkpoint(small).tensors
    assert (tensors["d2t"] + torch.arange(5)).tolist() == [1, 2, 3, 60, 61]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [1, 2, 3, 60, 61]
    assert MASK_ID == 63
    assert main([*arguments[:1], str(small), *arguments[2:]]) == 1
    assert "has a draft vocabulary already" in capsys.readouterr().err

    assert main(["inspect", str(small), *common]) == 0
    assert "the target's, 5 draft tokens" in (shown := capsys.readouterr().out)
    assert f"fits           {target}" in shown

    out = tmp_path / "speculators"
    convert = ["convert", str(small), str(out), "--layout", SPECULATORS]
    assert main(convert) == 1
    assert "name the target" in capsys.readouterr().err
    assert main([*convert, *common]) == 0
    head = load_borrowed_weights(target, torch.float32, CPU).head
    stored = read_checkpoint(out)
    assert torch.equal(stored.tensors["lm_head.weight"], head[[1, 2, 3, 60, 61]])
    assert stored.values["verifier_architectures"] == ["Qwen3ForCausalLM"]
    # The head that was copied drafts as the target's own rows do.
    borrowed = load_borrowed_weights(target, torch.float32, CPU)
    row = verify_row(5, 0, [0], 16)
    ours, theirs = (make_engine(p, borrowed).run(StepPlan(0, [row])) for p in (small, out))
    assert ours.draft_token_ids == theirs.draft_token_ids


def test_an_own_head_is_trimmed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random_draft(tmp_path / "own", draft_config(has_own_lm_head=True))
    checkpoint = read_checkpoint(tmp_path / "own")
    small = trimmed(checkpoint, KEPT)
    assert torch.equal(small.tensors["lm_head.weight"], checkpoint.tensors["lm_head.weight"][KEPT])
    write_checkpoint(small, tmp_path / "small", Z_LAB)
    values = read_checkpoint(tmp_path / "small").values
    assert (values["has_own_lm_head"], values["draft_vocab_size"]) == (True, len(KEPT))
    nowhere = random_weights()
    nowhere.head.zero_()
    engine = make_engine(tmp_path / "small", nowhere)
    (drafts,), logits = drafts_and_logits(engine, monkeypatch, SamplingParams())
    assert logits[:, KEPT].std() > 0.1 and set(drafts) <= set(KEPT.tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.full((8,), 60)}, "d2t leads to tokens 60 to 67, outside"),
        ({"d2t": KEPT * 0 - torch.arange(8)}, "the same token more than once"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "t2d and d2t do not agree"),
        ({"d2t": torch.zeros(9, dtype=torch.int64)}, "do not match config.json"),
    ],
)
def test_vocabularies_that_are_wrong(
    path: Path, tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    small = trimmed(read_checkpoint(path), KEPT)
    small.tensors |= change
    if "t2d" in change:
        write_checkpoint(trimmed(read_checkpoint(path), KEPT), tmp_path / "small", Z_LAB)
        from safetensors.torch import load_file, save_file

        file = tmp_path / "small" / "model.safetensors"
        save_file({**load_file(file), **change}, file)
        with pytest.raises(ConfigError, match=message):
            make_engine(tmp_path / "small")
        return
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(small, tmp_path / "small", Z_LAB)


def test_a_draft_vocabulary_beyond_the_targets_head(path: Path, tmp_path: Path) -> None:
    write_checkpoint(trimmed(read_checkpoint(path), KEPT), tmp_path / "small", Z_LAB)
    borrowed = random_weights(VOCAB - 5)
    assert borrowed.head.shape == (VOCAB - 5, HIDDEN)
    with pytest.raises(ConfigError, match="has token 62, but the target's head has 59 rows"):
        make_engine(tmp_path / "small", borrowed)
