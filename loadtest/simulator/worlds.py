"""Scripted truth: how likely draft tokens are accepted, and how long requests are.

Shapes: ``N`` requests, ``D`` = 15 draft positions, draft widths 2 to 16 as index ``draft_width - 2``.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gateway.coordinator.block_scheduler.records import FloatArray, IntArray

TRAINED_WIDTH = 16
"""The draft block that the drafter was trained for, anchor included."""
NUM_POSITIONS = TRAINED_WIDTH - 1
_RECURRENCE = 1.2207440846 ** -np.arange(1.0, 4.0)
"""Powers of the root of x^4 = x + 1, for even spread in three dimensions."""
CHUNK = 256
"""Requests are drawn so many at a time, so that how many are drawn does not change them."""


@dataclass(frozen=True, slots=True)
class TrafficKind:
    """Requests that are drafted alike.

    The hazard of draft token ``k``, given that those before it were accepted, has log-odds
    ``first_logit + slope * (k - 1) + shift``; a request draws its ``shift`` once.
    """

    name: str
    first_logit: float
    slope: float
    request_sd: float = 0.5
    narrow_loss: float = 0.15
    """Log-odds that the narrowest draft block loses against the trained one; between them in proportion."""
    mean_output: float = 150.0
    """Tokens until the stop token, of a geometric distribution."""
    max_output: int = 512
    mean_prompt: float = 300.0

    def hazards(self, draft_width: int, shifts: FloatArray) -> FloatArray:
        """Return ``[N, draft_width - 1]`` true probabilities for requests with these shifts ``[N]``."""
        narrowness = (TRAINED_WIDTH - draft_width) / (TRAINED_WIDTH - 2)
        logits = self.first_logit + self.slope * np.arange(draft_width - 1)
        return _sigmoid(logits - self.narrow_loss * narrowness + shifts[:, None])

    def acceptance_length(self, draft_width: int, num_points: int = 201) -> float:
        """Committed tokens per cycle over long requests, all of it verified.

        Requests of one length spend more cycles where acceptance is low, so it is the harmonic mean over
        requests.
        """
        quantiles = (np.arange(num_points) + 0.5) / num_points
        shifts = self.request_sd * _normal_quantile(quantiles)
        survival = np.cumprod(self.hazards(draft_width, shifts), axis=1)
        return float(1.0 / np.mean(1.0 / (1.0 + survival.sum(axis=1))))


@dataclass(frozen=True, slots=True)
class Traffic:
    """A mixture, in equal parts, of kinds."""

    name: str
    kinds: tuple[TrafficKind, ...]

    @property
    def max_output(self) -> int:
        """Longest output in tokens."""
        return max(kind.max_output for kind in self.kinds)


CODE = TrafficKind("code", first_logit=2.4, slope=-0.05)
MATH = TrafficKind("math", first_logit=2.15, slope=-0.05)
CHAT = TrafficKind("chat", first_logit=1.45, slope=-0.09)
PROSE = TrafficKind("prose", first_logit=0.6, slope=-0.12)
TRAFFICS = {
    **{kind.name: Traffic(kind.name, (kind,)) for kind in (CODE, MATH, CHAT, PROSE)},
    "mixed": Traffic("mixed", (CODE, MATH, CHAT, PROSE)),
}


class RequestPool:
    """Requests of one traffic in the order in which they start: the same ones, with the same luck, for
    every policy.

    Whether the draft token for output position ``p`` of a request is accepted, if it gets a trial, depends
    on one number drawn for ``(request, p)``. A position has at most one trial, so acceptance is the true
    hazard whatever widths are chosen. Owner: ``pool_of``; ``ensure`` mutates by appending.
    """

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self.traffic = traffic
        self._seed = [seed, zlib.crc32(traffic.name.encode())]
        self.kinds: IntArray = np.empty(0, np.int64)
        self.output_lens: IntArray = np.empty(0, np.int64)
        """True length of each output, stop token included."""
        self.max_outputs: IntArray = np.empty(0, np.int64)
        """What the client allows."""
        self.prompt_lens: IntArray = np.empty(0, np.int64)
        self.luck = np.empty((0, traffic.max_output + TRAINED_WIDTH), np.float32)
        self.hazards = np.empty((0, NUM_POSITIONS, NUM_POSITIONS), np.float32)
        """``[N, draft_width - 2, D]``; zero behind the draft block."""
        self.expected = np.empty((0, NUM_POSITIONS, TRAINED_WIDTH + 1), np.float64)
        """``[N, draft_width - 2, width]`` expected committed tokens of a cycle."""

    def ensure(self, num_requests: int) -> None:
        """Draw until there are ``num_requests``. Mutates."""
        have = len(self.kinds) // CHUNK
        need = -(-num_requests // CHUNK)
        if need <= have:
            return
        drawn = [self._draw(chunk) for chunk in range(have, max(need, have * 3 // 2))]
        parts = [self._columns(), *drawn]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        self.kinds, self.output_lens, self.max_outputs, self.prompt_lens = columns[:4]
        self.luck, self.hazards, self.expected = columns[4:]

    def kind_name(self, request: int) -> str:
        """Return the name of the kind that ``request`` is of."""
        return self.traffic.kinds[int(self.kinds[request])].name

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (
            self.kinds,
            self.output_lens,
            self.max_outputs,
            self.prompt_lens,
            self.luck,
            self.hazards,
            self.expected,
        )

    def _spread(self, chunk: int) -> FloatArray:
        """Return ``[CHUNK, 3]`` numbers in [0, 1) for kind, shift and length of requests.

        An additive recurrence from a random start: uniform like drawn numbers, but any few requests in a
        row are spread evenly, so that a run of twenty requests already is like its traffic.
        """
        start = np.random.default_rng([*self._seed, 0]).random(3)
        number = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
        spread: FloatArray = (start + number[:, None] * _RECURRENCE) % 1.0
        return spread

    def _draw(self, chunk: int) -> tuple[np.ndarray, ...]:
        spread = self._spread(chunk)
        kinds = (spread[:, 0] * len(self.traffic.kinds)).astype(np.int64)
        shifts = _normal_quantile(spread[:, 1])
        means = np.array([kind.mean_output for kind in self.traffic.kinds])[kinds]
        limits = np.array([kind.max_output for kind in self.traffic.kinds])[kinds]
        lengths = np.ceil(np.log1p(-spread[:, 2]) / np.log1p(-1.0 / means)).astype(np.int64)
        lengths = np.clip(lengths, 1, limits)
        rng = np.random.default_rng([*self._seed, chunk + 1])
        prompt_means = np.array([kind.mean_prompt for kind in self.traffic.kinds])[kinds]
        prompts = np.maximum(1, (prompt_means * rng.lognormal(-0.18, 0.6, CHUNK)).astype(np.int64))
        luck = rng.random((CHUNK, self.luck.shape[1]), np.float32)
        hazards = np.zeros((CHUNK, NUM_POSITIONS, NUM_POSITIONS))
        for number, kind in enumerate(self.traffic.kinds):
            mine = kinds == number
            for draft_width in range(2, TRAINED_WIDTH + 1):
                true = kind.hazards(draft_width, kind.request_sd * shifts[mine])
                hazards[mine, draft_width - 2, : draft_width - 1] = true
        expected = np.zeros((CHUNK, NUM_POSITIONS, TRAINED_WIDTH + 1))
        expected[..., 1] = 1.0
        expected[..., 2:] = 1.0 + np.cumsum(np.cumprod(hazards, axis=2), axis=2)
        return kinds, lengths, limits, prompts, luck, hazards.astype(np.float32), expected


@lru_cache(maxsize=16)
def pool_of(traffic: Traffic, seed: int) -> RequestPool:
    """Return the pool of a traffic and seed; policies share it."""
    return RequestPool(traffic, seed)


def _sigmoid(logits: FloatArray) -> FloatArray:
    values: FloatArray = 1.0 / (1.0 + np.exp(-logits))
    return values


def _normal_quantile(quantiles: FloatArray) -> FloatArray:
    """Return standard normal quantiles by interpolation in a table of the distribution, good to 1e-3."""
    points = np.linspace(-5.0, 5.0, 4001)
    density = np.exp(-0.5 * points**2)
    below = np.cumsum(density) - 0.5 * density
    return np.interp(quantiles, below / density.sum(), points)
