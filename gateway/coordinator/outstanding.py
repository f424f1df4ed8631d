"""Outstanding tokens: how much work an engine group still has in front of it.

A count of requests cannot tell a 3,000-token prompt from a greeting, and what a client *may* ask for is not
what it gets: ``max_tokens`` is the rest of the context when a client says nothing. So the work of a sequence
is the tokens it still has to prefill plus the output it is *expected* to commit yet:
``min(what max_tokens leaves, expected_output_tokens)``.

The expectation does not shrink while a sequence runs. Output lengths of real traffic are spread widely, and
of a sequence that has run for long nothing says that it will end soon; a memoryless guess is right for
geometric lengths, and near its ``max_tokens`` every sequence is counted exactly. Prompt and output count
alike: both are positions of a target pass. Prompt tokens that turn out to be cached count until the sequence
is admitted.
"""

from __future__ import annotations


def outstanding_tokens(
    num_to_prefill: int, num_may_commit: int, expected_output_tokens: int
) -> int:
    """Return the expected work of one sequence in tokens.

    Args:
        num_to_prefill: committed tokens whose K/V is not there yet.
        num_may_commit: output tokens that ``max_tokens`` still allows.
        expected_output_tokens: what an output is expected to have; see the module.
    """
    return num_to_prefill + min(num_may_commit, expected_output_tokens)
