"""The verifier engine: one target pass over all rows of a step, then acceptance and commit.

Holds tensors and no policy. Everything it needs comes with the plan; everything in its pool can be
rebuilt from committed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from dflash_ops.attention import AttentionForm
from dflash_ops.compiled_attention import RowKernel
from dflash_ops.paging import PagedPool
from dflash_ops.sampling import SamplingRun, choose_tokens
from dflash_ops.static_rows import BucketSizes
from dflash_wire.errors import FatalError
from dflash_wire.processors import TokenLogprobs
from dflash_wire.proposals import unpacked_proposals
from dflash_wire.records import DraftResult, StepPlan, StepResult
from dflash_wire.trees import TreeOutcome
from verifier.acceptance import accept, chain_within
from verifier.determinism import check_deterministic
from verifier.grammars import GrammarPool
from verifier.logprobs import Asked, logprobs_of
from verifier.packed_pass import PackedPass, PassOutput
from verifier.packing import PackedRow, pack_rows, with_drafts
from verifier.processors import ProcessedRow, process
from verifier.ranks import RankLeader
from verifier.rejection import choose_by_rejection
from verifier.slots import SlotPool
from verifier.static_verify import StaticVerifier
from verifier.target import TargetModel


class VerifierEngine:
    """Runs steps on the target model.

    Owner of the target KV pool and of the processors' slots; nobody else writes them. Between steps the pool
    covers exactly the committed inputs of every sequence.

    Args:
        target: the loaded model.
        pool: its KV pool.
        feature_pool: ``[rows, K*H]``, or as wide as ``project`` makes it, shared with the drafter;
            written here only.
        target_layer_ids: tapped layers, in the drafter's order.
        is_deterministic: give tokens the same bits whatever stands beside them.
        grammars: compiled for the target's vocabulary; None: no request may have one.
        form: of attention over ``pool``; None: row by row.
        ranks: the way to the other ranks of a split target, of which ``target`` is rank 0's share; None:
            it is whole.
        project: applied to the features ``[n, K*H]`` of kept positions before they go into the pool;
            None: they go there as they are.

    Raises:
        ConfigError: that is not possible with this target.
    """

    def __init__(
        self,
        target: TargetModel,
        pool: PagedPool,
        feature_pool: Tensor,
        target_layer_ids: list[int],
        *,
        is_deterministic: bool = False,
        grammars: GrammarPool | None = None,
        form: AttentionForm | None = None,
        ranks: RankLeader | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if is_deterministic:
            check_deterministic(target)
        self._ranks = ranks
        self._project = project
        self._form = form
        self._pass = PackedPass(target, pool, form, is_deterministic=is_deterministic)
        self.static: StaticVerifier | None = None
        """Steps that fit its buckets take that way."""
        self.target = target
        self.pool = pool
        self.feature_pool = feature_pool
        self.target_layer_ids = target_layer_ids
        self.grammars = grammars
        self._slots = SlotPool(target.vocab_size, target.device, grammars)
        self.num_guided_tokens = 0
        """Committed under a grammar."""
        self.num_forced_tokens = 0
        """Those of them to which it left no alternative."""
        self.num_written_drafts = 0
        """Accepted drafts that grammars had put into the drafter's places."""

    def use_static_passes(self, sizes: BucketSizes, limit_bytes: int) -> None:
        """Run what can be of steps over static memory from now on. Mutates.

        Needs a form of attention over the context of all rows, and a whole target for which
        ``static_verify.why_not_static`` has nothing to say.

        Args:
            sizes: of the buckets.
            limit_bytes: of captured passes.
        """
        assert self._form is not None and not isinstance(self._form, RowKernel)
        assert self._ranks is None
        self.static = StaticVerifier(
            self.target,
            self.pool,
            self.feature_pool,
            self.target_layer_ids,
            self._form,
            sizes,
            limit_bytes,
            self._project,
        )

    def compile_grammar(self, text: str) -> None:
        """Have a grammar ready for the slots that will need it; any thread may call this.

        Raises:
            InvalidRequestError: it is no grammar.
            FatalError: there are no grammars here.
        """
        if self.grammars is None:
            raise FatalError("this verifier has no vocabulary for grammars")
        self.grammars.compile(text)

    @torch.inference_mode()
    def run(self, plan: StepPlan, drafts: DraftResult) -> StepResult:
        """Verify, sample, accept and commit one step. Mutates the pool and the feature pool.

        Raises:
            FatalError: plan and drafts do not fit together.
            ExecutorLostError: another rank of the target is gone.
        """
        began = time.perf_counter()
        packed = pack_rows(plan, drafts)
        bucket = None if self.static is None else self.static.bucket_of(packed)
        if self.static is not None and bucket is not None:
            found = self.static.run(plan, packed, bucket)
            trees = [_tree_of(p, a.nodes) for p, a in zip(packed, found, strict=True)]
            committed = [acceptance.token_ids for acceptance in found]
            result = StepResult(plan.step_id, committed, trees=trees if any(trees) else None)
        else:
            result = self._run_packed(plan, packed)
        result.draft_ms, result.draft_began_s = drafts.draft_ms, drafts.began_s
        result.verify_began_s = began
        if any(p.is_short for p in packed):
            result.num_drafted = [len(p.draft_token_ids) for p in packed]
        result.verify_ms = (time.perf_counter() - began) * 1e3
        return result

    def _run_packed(self, plan: StepPlan, packed: list[PackedRow]) -> StepResult:
        """Any step, its rows packed as they are. May change drafts in ``packed``."""
        has_extras = any(row.extras is not None for row in plan.rows)
        processed = self._processed(packed) if has_extras else {}
        output = self._run_target(plan.step_id, packed)
        logits, chosen = self._choose(packed, output.hidden, list(processed.values()))
        committed, trees, kept, slots = self._accept(packed, chosen)
        self._commit(plan, output, kept, slots)
        self._advance(processed, packed, committed, kept)
        result = StepResult(plan.step_id, committed, trees=trees if any(trees) else None)
        if has_extras:
            result.logprobs = self._logprobs(packed, logits, committed, kept)
            result.prompt_logprobs = self._prompt_logprobs(packed, output.hidden)
        return result

    def _run_target(self, step_id: int, packed: list[PackedRow]) -> PassOutput:
        """The pass over all rows, on every rank."""
        if self._ranks is None:
            return self._pass.run(packed, self.target_layer_ids)
        with self._ranks.joint_pass(step_id, packed):
            return self._pass.run(packed, self.target_layer_ids)

    def _processed(self, packed: list[PackedRow]) -> dict[int, ProcessedRow]:
        """Rows that have processors and yield tokens, by their places. Fills slots, and puts tokens that
        grammars leave no choice about in the place of ``packed`` drafts."""
        found: dict[int, ProcessedRow] = {}
        for i, p in enumerate(packed):
            if p.row.extras is None or p.num_logits == 0:
                continue
            slot = self._slots.of(p.row)
            if slot is None:
                continue
            walk = None
            if slot.grammar is not None:
                walk = slot.grammar.walk(p.draft_token_ids, p.parents, p.rejects)
                packed[i] = p = with_drafts(p, walk.draft_token_ids)
            first = p.row.start_position + len(p.row.token_ids) - slot.num_prompt
            found[i] = (
                ProcessedRow(slot, p.logits_offset, first, walk=walk)
                if p.row.is_prefill
                else ProcessedRow(
                    slot, p.logits_offset, first, p.draft_token_ids, p.parents, p.depths, walk
                )
            )
        return found

    def _advance(
        self,
        processed: dict[int, ProcessedRow],
        packed: list[PackedRow],
        committed: list[list[int]],
        kept: list[list[int]],
    ) -> None:
        """Let slots take in what was committed. Mutates them, and counts what grammars did."""
        for i, row in processed.items():
            row.slot.advance(committed[i])
            walk, p = row.walk, packed[i]
            if walk is not None:
                nodes = [0] if p.row.is_prefill else [index - p.offset for index in kept[i]]
                self.num_guided_tokens += len(nodes)
                self.num_forced_tokens += sum(node in walk.forced for node in nodes)
                self.num_written_drafts += sum(node in walk.written for node in nodes)

    def _choose(
        self, packed: list[PackedRow], hidden: Tensor, processed: list[ProcessedRow]
    ) -> tuple[Tensor, list[int]]:
        """The target's logits ``[T, V]`` and its token after every position that yields one."""
        wanted: list[int] = []
        runs: list[SamplingRun] = []
        for p in packed:
            if p.num_logits:
                end = p.offset + p.width
                wanted += range(end - p.num_logits, end)
                runs.append(p.run)
        if not wanted:
            return hidden[:0], []
        if len(wanted) != hidden.shape[0]:
            hidden = hidden[torch.tensor(wanted, device=hidden.device)]
        logits = self.target.logits(hidden)
        scores = process(logits, processed) if processed else logits
        chosen: list[int] = choose_tokens(scores, runs).tolist()
        for p in packed:
            if p.rejects:
                run, drafts = p.run, p.draft_token_ids
                proposals = unpacked_proposals(p.proposals)
                mine = choose_by_rejection(scores, run, drafts, proposals)
                chosen[run.start : run.start + len(mine)] = mine
        return logits, chosen

    def _logprobs(
        self,
        packed: list[PackedRow],
        logits: Tensor,
        committed: list[list[int]],
        kept: list[list[int]],
    ) -> list[list[TokenLogprobs] | None] | None:
        """Log-probabilities of the committed tokens of rows that ask; None if none does."""
        asked: dict[int, Asked] = {}
        for i, (p, token_ids) in enumerate(zip(packed, committed, strict=True)):
            num_top = None if p.row.extras is None else p.row.extras.num_logprobs
            if num_top is None or not token_ids:
                continue
            # Of a prefill the last position alone has logits; else a node has one row of them.
            first = p.offset + p.width - p.num_logits - p.logits_offset
            places = [index - first for index in kept[i][-len(token_ids) :]]
            asked[i] = Asked(places, token_ids, num_top)
        if not asked:
            return None
        found = dict(zip(asked, logprobs_of(logits, list(asked.values())), strict=True))
        return [found.get(i) for i in range(len(packed))]

    def _prompt_logprobs(
        self, packed: list[PackedRow], hidden: Tensor
    ) -> list[list[TokenLogprobs] | None] | None:
        """Log-probabilities of known tokens, of prefill rows that ask; None if none does."""
        found: dict[int, list[TokenLogprobs]] = {}
        for i, p in enumerate(packed):
            extras = p.row.extras
            if extras is None or extras.num_prompt_logprobs is None:
                continue
            token_ids = p.row.token_ids[1:]
            if extras.next_token_id is not None:
                token_ids.append(extras.next_token_id)
            count = len(token_ids)
            found[i] = []
            if count:
                logits = self.target.logits(hidden[p.offset : p.offset + count])
                asked = Asked(list(range(count)), token_ids, extras.num_prompt_logprobs)
                (found[i],) = logprobs_of(logits, [asked])
        return [found.get(i) for i in range(len(packed))] if found else None

    def _accept(
        self, packed: list[PackedRow], chosen: list[int]
    ) -> tuple[list[list[int]], list[TreeOutcome | None], list[list[int]], list[Tensor]]:
        """Per row: committed ids, tree, packed indices whose K/V are kept, and their slots."""
        committed: list[list[int]] = []
        trees: list[TreeOutcome | None] = []
        kept: list[list[int]] = []
        for p in packed:
            mine = chosen[p.logits_offset : p.logits_offset + p.num_logits]
            if p.row.is_prefill:
                committed.append(mine)
                nodes = list(range(p.width))
            else:
                acceptance = accept(p.draft_token_ids, mine, p.parents)
                committed.append(acceptance.token_ids)
                nodes = acceptance.nodes
            trees.append(_tree_of(p, nodes))
            kept.append([p.offset + node for node in nodes])
        return committed, trees, kept, self._pass.slots(packed, kept)

    def _commit(
        self, plan: StepPlan, output: PassOutput, kept: list[list[int]], slots: list[Tensor]
    ) -> None:
        """Write the accepted path's K/V into pages, and its features to the front of the row's range.

        That range is the planned one: a tree may have turned out smaller.
        """
        if self._ranks is not None:
            self._ranks.keep(plan.step_id, kept)
        index = self._pass.index_of(kept)
        self._pass.keep(output.step, index, slots)
        places: list[int] = []
        for first, row_slots in zip(plan.feature_offsets(), slots, strict=True):
            places += range(first, first + row_slots.shape[0])
        features = output.features[index]
        if self._project is not None:
            features = self._project(features)
        where = torch.tensor(places, device=self.pool.device)
        self.feature_pool.index_copy_(0, where, features.to(self.feature_pool.dtype))


def _tree_of(p: PackedRow, nodes: list[int]) -> TreeOutcome | None:
    """What became of a row's tree; None for other rows."""
    if not p.row.is_tree:
        return None
    accepted_nodes = [node - 1 for node in nodes[1:]]
    return TreeOutcome(p.width - 1, accepted_nodes, p.scores, *chain_within(p.parents, nodes))
