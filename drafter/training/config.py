"""Settings of a drafter training run; the defaults are the paper's (arXiv 2602.06036)."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_wire.errors import ConfigError

OPTIMIZERS = ("adamw", "muon")
PUBLISHED_GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}


def default_gamma(draft_block_size: int) -> float:
    """Return the decay length of the position weights.

    The paper gives 7, 5 and 4 for sizes 16, 10 and 8. Other sizes lie on the straight lines through
    those points: half the size up to 10, then one more for every 3 positions.
    """
    if draft_block_size in PUBLISHED_GAMMAS:
        return PUBLISHED_GAMMAS[draft_block_size]
    if draft_block_size <= 10:
        return draft_block_size / 2
    return 5.0 + (draft_block_size - 10) / 3


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides the result of a run, apart from data, target and initial weights.

    Attributes:
        draft_block_size: anchor plus draft tokens.
        num_anchors: most draft blocks drawn per sequence and epoch.
        max_blocks_per_step: cap on the draft blocks of one step, shared evenly by its sequences, so
            that steps cost about the same. None: only ``num_anchors`` limits.
        gamma: decay length of the position weights; None looks it up by draft block size.
        narrow_share: share of draft blocks that are cut to a random smaller size, so that the drafter
            also works in narrower blocks than ``draft_block_size``. The paper has none.
        optimizer: ``adamw``, the paper's, or ``muon`` (matrices; norms stay with AdamW), which needs
            far fewer steps.
        peak_lr: learning rate after warm-up; falls to zero on a cosine.
        warmup_ratio: share of all steps spent on the linear warm-up.
        max_steps: end after this many steps instead of after ``epochs``; the cosine covers them.
        max_length: sequences are cut to this many tokens.
        tokens_per_step: padded tokens of the sequences in one step.
        use_bf16: run the draft model under bf16 autocast; weights and optimizer stay float32.
        logits_chunk: draft blocks whose logits exist at one time.
        feature_cache_gb: memory for target features kept between epochs (0: always recompute).
        checkpoint_every, log_every, evaluate_every: in steps; 0 turns evaluation off.
        held_out_blocks: draft blocks per sequence in an evaluation.
    """

    draft_block_size: int = 16
    num_anchors: int = 512
    max_blocks_per_step: int | None = None
    gamma: float | None = None
    narrow_share: float = 0.0
    optimizer: str = "adamw"
    peak_lr: float = 6e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    clip_norm: float = 1.0
    warmup_ratio: float = 0.04
    epochs: int = 6
    max_steps: int | None = None
    max_length: int = 3072
    tokens_per_step: int = 12288
    use_bf16: bool = True
    logits_chunk: int = 256
    feature_cache_gb: float = 0.0
    checkpoint_every: int = 500
    log_every: int = 20
    evaluate_every: int = 500
    held_out_blocks: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot train.

        Raises:
            ConfigError: names the field.
        """
        if self.draft_block_size < 2:
            raise ConfigError("draft_block_size must be at least 2: the anchor and one draft token")
        positive = ("num_anchors", "epochs", "max_length", "tokens_per_step", "logits_chunk")
        for name in (*positive, "checkpoint_every", "log_every", "held_out_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer must be one of {OPTIMIZERS}, not {self.optimizer!r}")
        if not 0.0 <= self.warmup_ratio < 1.0:
            raise ConfigError(f"warmup_ratio must be in [0, 1), not {self.warmup_ratio}")
        if not 0.0 <= self.narrow_share <= 1.0:
            raise ConfigError(f"narrow_share must be in [0, 1], not {self.narrow_share}")
        if self.gamma is not None and self.gamma <= 0:
            raise ConfigError(f"gamma must be positive, not {self.gamma}")

    @property
    def decay_length(self) -> float:
        """The gamma in use."""
        return default_gamma(self.draft_block_size) if self.gamma is None else self.gamma

    def anchors_per_row(self, num_rows: int) -> int:
        """Return how many anchors each of ``num_rows`` sequences may have in one step."""
        if self.max_blocks_per_step is None:
            return self.num_anchors
        return max(1, min(self.num_anchors, self.max_blocks_per_step // num_rows))
