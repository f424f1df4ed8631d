"""What the gateway is given at start: an engine, a tokenizer and fixed settings."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dflash_wire.drafters import DrafterLimits, default_drafter
from dflash_wire.ports import MAX_TREE_POSITIONS, EnginePort
from gateway.chat_tokenizer import ChatTokenizer
from gateway.parsers.registry import AUTO, OutputFormat, choose_format
from gateway.trace import ChunkRecorder


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling of a request that is silent about it, from the model's ``generation_config``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    rejects: bool = False
    """Drafts are accepted by rejection sampling unless a request says otherwise."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Everything the gateway knows about the model and its own limits; fixed at start."""

    model_id: str
    max_context: int
    """Longest sequence, prompt plus output, in tokens."""
    vocab_size: int
    """Prompt and stop token ids must be smaller than this."""
    eos_token_ids: tuple[int, ...]
    max_draft_block_size: int
    """The widest of its drafters' trained block sizes, anchor included."""
    default_policy: str
    """Block policy of requests that name none, as configured; the engine applies it, or what an operator
    has changed it to, and says so in a sequence's first chunk."""
    version: str
    sampling: SamplingDefaults = SamplingDefaults()
    owned_by: str = "dflash"
    admin_key: str | None = None
    """Opens the admin routes; None closes them."""
    max_body_bytes: int = 8 * 1024 * 1024
    max_choices_per_request: int = 64
    """Prompts times choices per prompt."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds, reported as the model's creation time."""

    max_tree_positions: int = MAX_TREE_POSITIONS
    """Largest tree that a request may ask for, anchor included."""
    drafters: tuple[DrafterLimits, ...] = ()
    """In the order of their indices; empty stands for the default drafter alone."""
    thinking_drafter: str | None = None
    """Drafter of chats that switch thinking on and name none; None is the default one."""
    non_thinking_drafter: str | None = None
    reasoning_parser: str = AUTO
    tool_parser: str = AUTO
    """Names of parsers, ``auto`` or ``none``."""

    @property
    def all_drafters(self) -> tuple[DrafterLimits, ...]:
        """``drafters``, never empty."""
        return self.drafters or default_drafter(self.max_draft_block_size)

    @property
    def system_fingerprint(self) -> str:
        """What responses carry as ``system_fingerprint``."""
        return f"dflash-{self.version}"


GrammarCheck = Callable[[str], Awaitable[str | None]]
"""Says what is wrong with a grammar (see ``Processors.grammar``); None if nothing is.

Raises:
    OverloadedError: too many wait for it.
    EngineUnavailableError: it cannot be asked.
"""


@dataclass(frozen=True, slots=True)
class GatewayState:
    """All that the endpoints need to answer."""

    engine: EnginePort
    tokenizer: ChatTokenizer
    settings: GatewaySettings
    recorder: ChunkRecorder | None = None
    """Records chunks for ``/trace``; None where that is off."""
    grammar_check: GrammarCheck | None = None
    """None: there is no guided decoding."""
    output_format: OutputFormat = field(init=False)
    """How the model's output is parsed; by default as its chat template says."""

    def __post_init__(self) -> None:
        settings, template = self.settings, self.tokenizer.chat_template
        chosen = choose_format(settings.reasoning_parser, settings.tool_parser, template)
        object.__setattr__(self, "output_format", chosen)


StateProvider = Callable[[], GatewayState]
"""Called for every request. Raises ``EngineUnavailableError`` while the server is starting."""
