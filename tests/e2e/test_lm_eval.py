"""lm-eval's ``local-completions`` scores the same with and without speculation: ``make test-lm-eval``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from started_server import ROOT, StartedServer

from loadtest import prompt_sets

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.filterwarnings("default")]

PROGRAM = ROOT / "build" / "lm-eval" / "bin" / "lm_eval"
NUM_ITEMS = 50
TIMEOUT_S = 1500
TURN = "<|im_start|>user\n{{question}}<|im_end|>\n<|im_start|>assistant\n"
NUMBER = "(-?[0-9]+(?:[.,][0-9]+)*)"
SCORES = [
    {
        "metric": "exact_match",
        "aggregation": "mean",
        "higher_is_better": True,
        "regexes_to_ignore": [","],
    }
]
FILTERS = [
    {
        "name": "last-number",
        "filter": [
            {"function": "regex", "group_select": -1, "regex_pattern": NUMBER},
            {"function": "take_first"},
        ],
    }
]


def items() -> list[dict[str, str]]:
    """Questions with answers: GSM8K's where ``DFLASH_DATA`` has them, else our own with none that counts."""
    folder = prompt_sets.data_folder()
    if folder is not None and (folder / "gsm8k_dev.jsonl").is_file():
        lines = (folder / "gsm8k_dev.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines[:NUM_ITEMS]]
        answers = [row["answer"].rpartition("#### ")[2] for row in rows]
        return [
            {"question": row["question"], "answer": answer}
            for row, answer in zip(rows, answers, strict=True)
        ]
    prompts = prompt_sets.load("word_problems")[:NUM_ITEMS]
    return [{"question": one.messages[-1]["content"], "answer": "12"} for one in prompts]


def write_tasks(folder: Path) -> list[str]:
    """Write one generating task per policy, and one that asks for likelihoods; return their names."""
    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": TURN,
        "num_fewshot": 0,
        "metadata": {"version": 1},
    }
    names = []
    for policy in ("off", "static:8", "adaptive"):
        name = f"answers_{policy.partition(':')[0]}"
        task = {
            **{"task": name, "output_type": "generate_until", "doc_to_target": "{{answer}}"},
            **{"metric_list": SCORES, "filter_list": FILTERS},
            "generation_kwargs": {
                **{"until": ["<|im_end|>", "\n\n"], "max_gen_toks": 128, "temperature": 0},
                "dflash": {"policy": policy},
            },
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**common, **task}))
        names.append(name)
    choices = {
        **{"task": "likelihoods", "output_type": "multiple_choice", "doc_to_target": 0},
        "doc_to_choice": ["The answer is 12.", "@#@#@#@#@#@#"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "likelihoods.yaml").write_text(yaml.safe_dump({**common, **choices}))
    return [*names, "likelihoods"]


@pytest.mark.timeout(TIMEOUT_S)
def test_scores_do_not_depend_on_the_policy(
    server: StartedServer, model: str, tmp_path: Path
) -> None:
    if not PROGRAM.exists():
        pytest.skip("build/lm-eval is not there: make test-lm-eval")
    tasks, output = tmp_path / "tasks", tmp_path / "output"
    tasks.mkdir()
    names = write_tasks(tasks)
    options = {
        "model": model,
        "base_url": f"{server.base_url}/v1/completions",
        "tokenizer": str(ROOT / "models" / "demo" / "target"),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 2048,
    }
    done = subprocess.run(
        [
            *(PROGRAM, "--model", "local-completions", "--include_path", tasks),
            *("--model_args", ",".join(f"{name}={value}" for name, value in options.items())),
            *("--tasks", ",".join(names), "--output_path", output, "--log_samples"),
        ],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    print(done.stdout[-2500:])
    assert "Traceback" not in done.stdout
    (results,) = output.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    answers = {name: answers_of(output, name) for name in names[:-1]}
    plain = answers["answers_off"]
    assert len(plain) == NUM_ITEMS and all(plain)
    for name in names[:-1]:
        assert answers[name] == plain
        of_task = scores[name]["exact_match,last-number"]
        assert of_task == scores["answers_off"]["exact_match,last-number"]
    assert scores["likelihoods"]["acc,none"] > 0.9


def answers_of(output: Path, task: str) -> list[str]:
    """Return what was generated for each item, in order."""
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return [row["resps"][0][0] for row in sorted(rows, key=lambda row: row["doc_id"])]
