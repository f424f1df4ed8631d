"""Whether a peer sees the prompts as we do: same chat template, same token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadtest.bench_rows import ApiClient
from loadtest.processes import BenchError
from loadtest.prompt_sets import Prompt


def peer_token_ids(client: ApiClient, peer: str, prompt: Prompt) -> list[int]:
    """Token ids of a conversation as the peer would continue it.

    Raises:
        BenchError: the server answered with an error.
    """
    if peer == "vllm":
        body = {"model": "pair", "messages": prompt.messages, "add_generation_prompt": True}
        return list(client.call("/tokenize", body)["tokens"])
    text = client.call("/apply-template", {"messages": prompt.messages})["prompt"]
    body = {"content": text, "add_special": True, "parse_special": True}
    return list(client.call("/tokenize", body)["tokens"])


def check_tokens(
    client: ApiClient, peer: str, prompts: Sequence[Prompt], ours: Mapping[str, list[int]]
) -> None:
    """Compare every prompt with ``ours``, token ids by prompt id.

    Raises:
        BenchError: a prompt differs, so no figure of this peer would mean anything.
    """
    for prompt in prompts:
        theirs, expected = peer_token_ids(client, peer, prompt), ours[prompt.prompt_id]
        if theirs != expected:
            shorter = min(len(theirs), len(expected))
            places = (i for i in range(shorter) if theirs[i] != expected[i])
            place = next(places, shorter)
            raise BenchError(
                f"{peer} encodes {prompt.prompt_id} differently from token {place} on: "
                f"{theirs[place : place + 4]} instead of {expected[place : place + 4]}"
            )
