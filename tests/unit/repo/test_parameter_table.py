"""Every row of the README's parameter table is covered by tests, which are named here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
GATEWAY = "tests/unit/gateway/"
COVERED_BY = {
    "max_tokens": ["test_chat.py::test_request_reaches_the_engine_as_asked"],
    "n": ["test_choices.py::test_choice_0_is_what_n_1_gives_and_each_can_be_had_alone"],
    "stop": [
        "test_chat.py::test_stop_string_across_chunks_ends_the_request",
        "test_choices.py::test_token_ids_end_with_the_stop_string",
    ],
    "stream": [
        "test_chat.py::test_openai_client_stream_with_usage_and_stats",
        "test_choices.py::test_continuous_usage_grows_to_the_last",
    ],
    "return_token_ids": ["test_choices.py::test_token_ids_of_a_stream_are_those_of_the_whole"],
    'dflash: {"policy"': ["test_chat.py::test_request_reaches_the_engine_as_asked"],
    'dflash: {"drafter"': ["test_drafters.py::test_completions_choose_by_name_alone"],
    "chat_template_kwargs": ["test_drafters.py::test_the_template_learns_about_thinking"],
    "cache_salt": ["test_metrics.py::test_cached_prompt_tokens"],
    "priority": ["test_choices.py::test_priority_reaches_the_engine"],
    "tools": [
        "test_tools.py::test_a_stream_adds_up_to_the_whole_however_it_is_cut",
        "test_tools.py::test_one_call_at_a_time_ends_with_the_first",
        "test_tools.py::test_no_tools_are_offered_where_none_may_be_called",
    ],
    "tool_choice": [
        "test_grammars.py::test_calls_that_are_demanded_are_forced",
        "test_tools.py::test_refusals",
        "test_grammars.py::test_a_strict_tool_is_called_by_its_schema_or_not_at_all",
        "test_grammars.py::test_strict_tools_that_cannot_be_forced_are_refused",
    ],
    "reasoning_content": ["test_tools.py::test_a_whole_answer_is_taken_apart"],
    "user": ["test_parameters.py::test_labels_of_the_client_are_accepted_and_not_ignored"],
    "min_p": [
        "test_processors.py::test_all_processors_reach_the_engine",
        "test_processors.py::test_wrong_values_are_refused",
    ],
    "min_tokens": [
        "test_processors.py::test_min_tokens_hold_back_the_end_of_sequence",
        "test_processors.py::test_stop_strings_count_behind_min_tokens",
    ],
    "logprobs": ["test_logprobs.py::test_chat", "test_logprobs.py::test_completion"],
    "prompt_logprobs": [
        "test_logprobs.py::test_prompt_logprobs",
        "test_logprobs.py::test_echo_with_logprobs",
    ],
    'dflash: {"sampling"': ["test_processors.py::test_how_drafts_are_accepted"],
    "response_format": [
        "test_grammars.py::test_every_field_becomes_a_form",
        "test_grammars.py::test_the_responses_api_says_it_in_its_own_way",
    ],
    "structured_outputs": [
        "test_grammars.py::test_every_field_becomes_a_form",
        "test_grammars.py::test_refusals",
        "test_grammars.py::test_what_cannot_be_compiled_is_refused_before_the_first_byte",
    ],
    "best_of": ["test_parameters.py::test_unsupported"],
    "fields nobody knows": ["test_parameters.py::test_unknown_fields_are_listed"],
}
"""Beginning of a row's first cell, without quotes -> tests."""


def rows() -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, behind = readme.partition("| parameter | |\n|---|---|\n")
    table, _, _ = behind.partition("\n\n")
    return [line.split(" | ")[0].removeprefix("| ").replace("`", "") for line in table.splitlines()]


def begins(row: str, name: str) -> bool:
    """Whether a row is about the parameter ``name`` first, and not about one whose name only begins so."""
    return re.match(rf"{re.escape(name)}(?!\w)", row) is not None


def test_every_row_has_tests_and_every_entry_a_row() -> None:
    found = rows()
    assert len(found) > 10
    missing = [row for row in found if not any(begins(row, name) for name in COVERED_BY)]
    assert missing == []
    unused = [name for name in COVERED_BY if not any(begins(row, name) for row in found)]
    assert unused == []


@pytest.mark.parametrize("test", sorted({test for tests in COVERED_BY.values() for test in tests}))
def test_the_named_tests_exist(test: str) -> None:
    file, _, name = test.partition("::")
    source = (ROOT / GATEWAY / file).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), test
