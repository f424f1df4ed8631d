"""The training loop: schedule, optimizer, logs and checkpoints that continue exactly.

What a step does depends on (config, data, target, initial weights, step) only: batches and anchors
are drawn from seeds, so a resumed run repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dflash_wire.errors import ConfigError
from drafter.model import DraftModel
from drafter.training.capture import FeatureSource, TargetTables
from drafter.training.config import TrainingConfig
from drafter.training.data import BatchPlan, TrainingRow, collate
from drafter.training.evaluation import evaluate_drafter
from drafter.training.objective import (
    BlockScores,
    draft_hidden,
    draw_anchors,
    draw_sizes,
    lay_out,
    position_weights,
    score_blocks,
)
from drafter.training.optimizers import make_optimizers

logger = logging.getLogger(__name__)

STATE_FILE = "state.pt"
LOG_FILE = "log.jsonl"
NUM_TIMED_STEPS = 6
# Settings that may change between a checkpoint and its continuation without changing its meaning.
FREE_SETTINGS = {
    "checkpoint_every",
    "log_every",
    "evaluate_every",
    "held_out_blocks",
    "feature_cache_gb",
}


def learning_rate(step: int, total_steps: int, config: TrainingConfig) -> float:
    """Return the rate of a 0-based step: linear warm-up, then a cosine to zero."""
    warmup = math.ceil(total_steps * config.warmup_ratio)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return config.peak_lr * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """Trains one draft model.

    Owner of the optimizers and of the files in ``work``; mutates ``model``.

    Args:
        model: from ``build_draft_model``, float32.
        source: target features.
        tables: the target's embedding and head; never changed.
        rows: training rows.
        held_out: rows for evaluation; may be empty.
        config: the run.
        work: folder of ``state.pt`` and ``log.jsonl``; an existing state is resumed.
        minutes: instead of a number of steps: measure a step, then fix how many fit. Only asked
            at the first start; a continuation keeps the number.

    Raises:
        ConfigError: the state in ``work`` belongs to another configuration.
    """

    def __init__(
        self,
        model: DraftModel,
        source: FeatureSource,
        tables: TargetTables,
        rows: list[TrainingRow],
        held_out: list[TrainingRow],
        config: TrainingConfig,
        work: Path,
        minutes: float | None = None,
    ) -> None:
        self.model = model.train()
        self.config = config
        self.step = 0
        self.held_out_figures: dict[str, Any] | None = None
        self._source = source
        self._tables = tables
        self._rows = rows
        self._held_out = held_out
        self._work = work
        self._device = next(model.parameters()).device
        self._plan = BatchPlan(
            [len(r.input_ids) for r in rows], config.tokens_per_step, config.seed
        )
        weights = position_weights(config.draft_block_size, config.decay_length)
        self._weights = weights.to(self._device)
        self._optimizers = make_optimizers(model, config)
        work.mkdir(parents=True, exist_ok=True)
        if (work / STATE_FILE).exists():
            self.total_steps = self._resume()
        elif minutes is not None:
            self.total_steps = self._steps_within(minutes * 60)
        else:
            self.total_steps = config.max_steps or self._plan.num_steps(config.epochs)

    def run(self, until: int | None = None) -> None:
        """Train to the last step, or to step ``until``; ends with an evaluation and a checkpoint."""
        end = self.total_steps if until is None else min(until, self.total_steps)
        window: BlockScores | None = None
        began = time.monotonic()
        bar = tqdm(total=self.total_steps, initial=self.step, desc="drafter", mininterval=5.0)
        while self.step < end:
            scores = self._train_step()
            window = scores if window is None else window + scores
            self.step += 1
            bar.update()
            if self.step % self.config.log_every == 0:
                elapsed = time.monotonic() - began
                self._log(bar, window, elapsed)
                window, began = None, time.monotonic()
            if self._held_out and self._is_due(self.config.evaluate_every, end):
                self.evaluate()
            if self._is_due(self.config.checkpoint_every, end):
                self._save()
        bar.close()

    def evaluate(self) -> dict[str, Any]:
        """Score the held-out rows; returns and logs the figures."""
        metrics = evaluate_drafter(
            self.model, self._source, self._tables, self._held_out, self.config
        )
        record = {"step": self.step, "total_steps": self.total_steps, "held_out": asdict(metrics)}
        self.held_out_figures = record
        self._write(record)
        tqdm.write(f"step {self.step} held-out loss {metrics.loss:.4f} eal {metrics.eal:.3f}")
        return record

    def scores(self, step: int) -> BlockScores:
        """Run the forward pass of a 0-based step; mutates nothing."""
        config = self.config
        epoch, index = self._plan.locate(step)
        batch = collate(self._rows, self._plan.epoch(epoch)[index])
        quota = config.anchors_per_row(len(batch.row_ids))
        size, anchors, sizes = config.draft_block_size, [], []
        for row_id, mask in zip(batch.row_ids, batch.loss_mask, strict=True):
            generator = self._generator(epoch, row_id)
            anchors.append(draw_anchors(mask, quota, generator))
            sizes.append(draw_sizes(len(anchors[-1]), size, config.narrow_share, generator))
        blocks = lay_out(batch, anchors, size, sizes).to(self._device)
        features = self._source.features(batch.input_ids.to(self._device), batch.lengths)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=config.use_bf16):
            hidden = draft_hidden(self.model, self._tables, features, blocks)
            return score_blocks(
                hidden, self._tables.lm_head, blocks, self._weights, config.logits_chunk
            )

    def _train_step(self) -> BlockScores:
        rate = learning_rate(self.step, self.total_steps, self.config)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        scores = self.scores(self.step)
        loss: Tensor = scores.loss / scores.weight
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return scores.detached()

    def _generator(self, epoch: int, row_id: int) -> torch.Generator:
        """Anchors are redrawn every epoch and do not depend on who shares the batch."""
        seed = (self.config.seed * 1009 + epoch) * 1_000_003 + row_id
        return torch.Generator().manual_seed(seed % 2**63)

    def _is_due(self, every: int, end: int) -> bool:
        return every > 0 and (self.step % every == 0 or self.step == end)

    def _steps_within(self, seconds: float) -> int:
        """Time forward and backward passes of the first steps without learning from them.

        A second pass over the same steps finds their features in the cache, if there is one; the
        first epoch is counted at the first pass's cost, the others at the second's.
        """
        self.scores(0).loss.backward()
        per_step = []
        for _ in range(2):
            began = time.monotonic()
            for step in range(1, NUM_TIMED_STEPS + 1):
                self.scores(step).loss.backward()
            per_step.append((time.monotonic() - began) / NUM_TIMED_STEPS)
        self.model.zero_grad(set_to_none=True)
        first, later = per_step[0], min(per_step)
        epoch_steps = len(self._plan.epoch(0))
        steps = seconds / first
        if steps > epoch_steps:
            steps = epoch_steps + (seconds - epoch_steps * first) / later
        logger.info("a step takes %.3f s, with cached features %.3f s", first, later)
        return max(1, int(steps))

    def _log(self, bar: Any, window: BlockScores, elapsed: float) -> None:
        metrics = window.metrics()
        rate = learning_rate(self.step - 1, self.total_steps, self.config)
        epoch, _ = self._plan.locate(self.step - 1)
        record = {
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": epoch,
            **asdict(metrics),
            "learning_rate": rate,
            "blocks_per_s": round(window.num_blocks / elapsed, 1),
        }
        self._write(record)
        bar.set_postfix(loss=f"{metrics.loss:.3f}", eal=f"{metrics.eal:.2f}", epoch=epoch)

    def _write(self, record: dict[str, Any]) -> None:
        with (self._work / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")

    def _contract(self) -> dict[str, Any]:
        settings = {k: v for k, v in asdict(self.config).items() if k not in FREE_SETTINGS}
        return {**settings, "num_rows": len(self._rows), "taps": self.model.target_layer_ids}

    def _save(self) -> None:
        state = {
            "contract": self._contract(),
            "total_steps": self.total_steps,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        path = self._work / STATE_FILE
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)  # a crash while writing leaves the old state whole

    def _resume(self) -> int:
        path = self._work / STATE_FILE
        state = torch.load(path, weights_only=True, map_location=self._device)
        saved, own = state["contract"], self._contract()
        different = sorted(key for key in own if saved.get(key) != own[key])
        if different:
            raise ConfigError(
                f"{path} was written with other values of {', '.join(different)}; "
                "use the same ones, or another folder"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step = state["step"]
        return int(state["total_steps"])
