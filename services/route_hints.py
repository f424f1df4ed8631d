"""What a gateway tells the router about a request, beside the opaque frame."""

from __future__ import annotations

from typing import Any

from dflash_wire.records import GenerationRequest
from gateway.coordinator.outstanding import outstanding_tokens
from gateway.routing.prefix_names import prefix_names


class RouteHints:
    """Makes the keyword arguments by which ``EngineGroupRouter`` decides. Immutable.

    Args:
        page_size: tokens per page of the engines.
        expected_output_tokens: see ``outstanding_tokens``.
    """

    def __init__(self, page_size: int, expected_output_tokens: int) -> None:
        self._page_size = page_size
        self._expected_output_tokens = expected_output_tokens

    def of(self, request: GenerationRequest) -> dict[str, Any]:
        """Return ``work`` in tokens and ``prefix``, the packed names of the prompt's beginnings."""
        prompt = request.prompt_token_ids
        work = outstanding_tokens(len(prompt), request.max_tokens, self._expected_output_tokens)
        names = prefix_names(prompt, request.cache_salt, self._page_size)
        return {"work": work, "prefix": names}
