"""How a request's tokens are chosen from the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's next token is chosen. ``temperature == 0`` is greedy.

    ``seed`` is always set: with the position it fixes the noise (DESIGN "coupled" sampling), so the
    output is a function of model, prompt, parameters and seed alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int = 0
    """0 <= seed < 2**63."""
    min_p: float = 0.0
    """Least probability of a candidate, as a share of the likeliest one's."""
    rejects: bool = False
    """Drafts are sampled by themselves and corrected by rejection: then the output is distributed as plain
    decoding's, but depends on widths. False: ``coupled``. At temperature 0 both are the same."""

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts come by chance of their own, and are kept by chance."""
        return self.rejects and self.temperature > 0


GREEDY = SamplingParams()
