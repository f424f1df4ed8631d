"""What DFlash servers are known to get wrong, each with the tests here that would see it.

Collected from the issue trackers of vLLM, SGLang, TensorRT-LLM, SpecForge, speculators and z-lab's code.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).resolve().parents[2]
SEEN_BY = {
    "features are tapped one layer off": [
        "unit/drafter/test_golden.py::test_logits_over_cycles",
        "unit/drafter/test_model.py::test_default_taps_equal_the_reference_package",
        "unit/training/test_capture.py::test_features_are_layer_outputs_in_list_order",
    ],
    "the drafter has another head, vocabulary or causal flag than the file says": [
        "unit/drafter/test_borrowed.py::test_tied_with_a_stale_head_in_the_file",
        "unit/drafter/test_borrowed.py::test_untied",
        "unit/drafter/test_checkpoint.py::test_copies_of_the_target_are_left_out",
        "unit/drafter/test_golden_speculators.py::test_logits_of_a_block",
        "unit/drafter/test_model.py::test_what_layers_see",
        "unit/drafter/test_trim.py::test_a_draft_vocabulary_beyond_the_targets_head",
    ],
    "training and serving write prompts differently": [
        "unit/services/test_template.py::test_training_and_serving_write_a_conversation_alike",
        "unit/gateway/test_drafters.py::test_the_template_learns_about_thinking",
    ],
    "outputs are wrong only under concurrency": [
        "unit/services/test_mixed_batch.py::test_64_mixed_requests_equal_each_alone",
        "unit/drafter/test_engine.py::test_rows_of_mixed_widths_equal_each_alone",
        "unit/coordinator/test_random_runs.py::TestRandomRuns",
        "e2e/test_openai_client.py::test_eight_concurrent_requests_of_mixed_lengths",
    ],
    "speculation is slower than plain decoding where many share the machine": [
        "unit/block_scheduler/test_scheduler.py::"
        "test_good_drafts_are_verified_wide_and_bad_ones_not_at_all",
        "unit/block_scheduler/test_guards.py::test_speculation_must_beat_plain_decoding_by_a_margin",
        "unit/simulator/test_worlds.py::"
        "test_lost_drafter_leaves_plain_decoding_and_a_stale_one_gives_nothing",
    ],
    "a prefix from the cache starves or corrupts the drafter": [
        "unit/services/test_acceptance_after_hit.py::test_cycles_after_a_hit_are_those_of_a_miss",
        "unit/services/test_other_drafters.py::test_drafts_after_a_hit_are_those_of_a_miss",
        "unit/coordinator/test_prefix_cache.py::"
        "test_pages_without_context_serve_only_who_needs_none",
        "unit/coordinator/test_scheduling.py::test_admission_waits_for_room_for_a_first_draft_block",
    ],
    "sliding windows of another size or direction": [
        "unit/verifier/test_families.py::test_wide_steps_equal_plain_decoding",
        "unit/drafter/test_model.py::test_what_layers_see",
        "unit/drafter/test_golden_second.py::test_cycles",
        "unit/drafter/test_golden_speculators.py::test_logits_of_a_block",
    ],
    "layers with a running state keep rejected drafts": [
        "unit/verifier/test_target.py::test_unsupported",
    ],
    "Gemma: rejected positions are written, embeddings not scaled, logits not capped": [
        "unit/verifier/test_families.py::test_logits",
        "unit/verifier/test_families.py::test_plain_decoding_equals_transformers",
        "unit/verifier/test_engine.py::test_drafts_never_change_the_output",
        "unit/drafter/test_engine.py::test_ingest_writes_its_positions_only",
    ],
    "penalties are ignored, or do not see the draft": [
        "unit/verifier/test_processors.py::test_every_node_equals_the_naive_processors",
        "unit/services/test_sampling_demo.py::test_every_processor_equals_off",
    ],
    "a grammar is out of step inside a draft block": [
        "unit/verifier/test_matching.py::test_every_node_has_what_its_own_path_allows",
        "unit/services/test_sampling_property.py::test_any_policy_equals_off",
        "unit/services/test_strict_calls_demo.py::"
        "test_calls_that_begin_by_themselves_are_plain_decodings",
    ],
    "more is told than a stop string or a length inside a draft block leaves": [
        "unit/gateway/test_choices.py::test_token_ids_end_with_the_stop_string",
        "unit/gateway/test_logprobs.py::test_streams_add_up_to_the_whole",
        "unit/coordinator/test_lossless.py::test_stop_token_anywhere_in_a_draft_block",
        "unit/coordinator/test_lossless.py::test_widths_near_the_end_follow_the_reference_loop",
        "e2e/test_openai_client.py::test_stop_string_cuts_alike_under_every_policy",
    ],
    "usage counts more reasoning than output": [
        "unit/gateway/test_tools.py::test_no_more_tokens_are_reasoning_than_there_are",
    ],
    "parsers take a marker to pieces when several tokens come at once": [
        "unit/parsers/test_chunks.py::test_cutting_changes_nothing",
        "unit/parsers/test_chunks.py::test_calls_come_back_as_they_were_written",
        "unit/gateway/test_stop_strings.py::test_any_cutting_gives_the_reference",
    ],
    "log-probabilities are missing, or of other tokens": [
        "unit/gateway/test_logprobs.py::test_chat",
        "unit/services/test_sampling_property.py::test_any_policy_equals_off",
        "e2e/test_openai_client.py::test_log_probabilities_do_not_depend_on_the_policy",
    ],
    "a seed, or no temperature, does not repeat an output": [
        "unit/services/test_sampling_property.py::test_any_policy_equals_off",
        "unit/services/test_deterministic.py::test_alone_and_in_company_are_the_same_bits",
        "e2e/test_openai_client.py::test_fresh_seed_is_returned_and_replays",
        "serve/test_lossless.py::test_off_equals_transformers_generate",
    ],
    "quantised weights are taken for plain ones": [
        "unit/verifier/test_target.py::test_unsupported",
        "unit/drafter/test_checkpoint.py::test_unknown_keys",
    ],
    "memory: pages that nobody counts, or that leak": [
        "unit/coordinator/test_random_runs.py::TestRandomRuns",
        "unit/coordinator/test_page_allocator.py::test_random_growth_and_release",
        "unit/coordinator/test_lossless.py::test_what_remains_limits_how_deep_a_tree_is",
        "unit/services/test_spec_and_settings.py::test_a_small_pool_bounds_the_context",
    ],
    "a preempted sequence comes back without the drafter's context": [
        "unit/coordinator/test_prefix_cache.py::test_a_preempted_sequence_finds_its_own_pages",
        "unit/coordinator/test_feeding.py::test_drafts_after_plain_steps_find_their_context",
        "unit/drafter/test_conformance.py::test_pieces_and_pauses_do_not_matter",
    ],
    "rotary embeddings are read wrongly from a config": [
        "unit/ops/test_rotary.py::test_equals_transformers",
        "unit/verifier/test_target.py::test_llama3_rope",
        "unit/drafter/test_model.py::test_ropes_that_are",
        "unit/drafter/test_model.py::test_ropes_that_are_not_implemented",
    ],
    "the name of a folder or an architecture chooses the wrong drafter": [
        "unit/services/test_drafter_kinds.py::test_names_of_folders_say_nothing",
        "unit/drafter/test_model.py::test_another_architecture",
    ],
}
"""Tensor parallelism, which lets ranks disagree about what is accepted, does not exist here."""


@pytest.mark.parametrize("test", sorted({test for tests in SEEN_BY.values() for test in tests}))
def test_the_named_tests_exist(test: str) -> None:
    file, _, name = test.partition("::")
    source = (TESTS / file).read_text(encoding="utf-8")
    assert re.search(rf"^((async )?def {name}\(|{name} = )", source, re.MULTILINE), test
