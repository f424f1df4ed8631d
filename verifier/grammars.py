"""Grammars in the form that masks tokens: compiled once, for this target's vocabulary.

xgrammar does the work. It is imported when the first grammar comes, so others wait for nothing.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dflash_wire.errors import InvalidRequestError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

MOST_BYTES = 256 * 1024 * 1024
"""Of compiled grammars that are kept; the latest one always is."""
TEXT_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
"""Special tokens that grammars may spell: what gateways read as text. No other is text to a grammar."""


LIMITED_CHARACTER = (
    r"(([^\"\\\r\n]))",
    r'(([^\0-\x1f\"\\]) | ("\\" [\"\\/bfnrt]))',
)
"""How xgrammar writes a character of a string of limited length, and how JSON does: there are no tabs, but
escapes."""


def load_vocabulary(path: str, vocab_size: int, end_token_ids: Sequence[int]) -> TokenizerInfo:
    """Read the tokenizer of a target.

    Args:
        path: the target's folder.
        vocab_size: of the model; ids that the tokenizer does not have are in no grammar.
        end_token_ids: what ends a sequence, and is allowed where a grammar may end and nowhere else.
    """
    from transformers import PreTrainedTokenizerFast
    from xgrammar import TokenizerInfo

    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    found = TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=list(end_token_ids)
    )
    special = {
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in TEXT_MARKERS
    }
    return vocabulary(found.decoded_vocab, end_token_ids, special)


def vocabulary(
    tokens: Sequence[bytes], end_token_ids: Sequence[int], special: Collection[int] = ()
) -> TokenizerInfo:
    """Return a vocabulary by its bytes; what is empty or ``special`` is in no grammar."""
    from xgrammar import TokenizerInfo

    texts = [b"" if i in special else bytes(token) for i, token in enumerate(tokens)]
    return TokenizerInfo(texts, stop_token_ids=list(end_token_ids))


def spelled_out(form: Any) -> Any:
    """Return a form in which JSON Schemas are EBNF: of texts as ``json.dumps`` writes them.

    xgrammar's own form allows any white space between the parts, which leaves hardly any text without
    alternatives, and answers of nothing else.
    """
    from xgrammar import Grammar

    if isinstance(form, list):
        return [spelled_out(one) for one in form]
    if not isinstance(form, dict):
        return form
    if form.get("type") != "json_schema" or form.keys() != {"type", "json_schema"}:
        return {key: spelled_out(value) for key, value in form.items()}
    found = Grammar.from_json_schema(
        json.dumps(form["json_schema"]), any_whitespace=False, separators=(", ", ": ")
    )
    return {"type": "grammar", "grammar": str(found).replace(*LIMITED_CHARACTER)}


class GrammarPool:
    """Compiled grammars by their texts, the most recently used ones.

    Owner: ``VerifierEngine``. Any thread may compile; others that ask meanwhile wait. The interpreter is free
    while xgrammar works, so a step loop goes on.

    Args:
        load: reads the vocabulary, once.
        most_bytes: see ``MOST_BYTES``.
    """

    def __init__(self, load: Callable[[], TokenizerInfo], most_bytes: int = MOST_BYTES) -> None:
        self._load = load
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self.num_compiled = 0
        self.end_token_ids: tuple[int, ...] = ()
        """Known as soon as anything is compiled."""

    def compile(self, text: str) -> CompiledGrammar:
        """Return a grammar, compiled now or earlier. Mutates.

        Raises:
            InvalidRequestError: it is none.
        """
        found = self._kept.get(text)
        if found is not None and not self._lock.acquire(blocking=False):
            return found  # rather than wait until another one is compiled
        if found is None:
            self._lock.acquire()
        try:
            if text not in self._kept:
                self._add(text, self._compile(text))
            self._kept.move_to_end(text)
            return self._kept[text]
        finally:
            self._lock.release()

    def _compile(self, text: str) -> CompiledGrammar:
        from xgrammar import GrammarCompiler

        if self._compiler is None:
            info = self._load()
            self.end_token_ids = tuple(info.stop_token_ids)
            # One thread: the steps of everybody else need the CPUs, too.
            self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.num_compiled += 1
        try:
            tag = json.loads(text)
            form = spelled_out(tag["format"])
            return self._compiler.compile_structural_tag(json.dumps({**tag, "format": form}))
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequestError(reason_of(error)) from error

    def _add(self, text: str, compiled: CompiledGrammar) -> None:
        self._kept[text] = compiled
        self._num_bytes += compiled.memory_size_bytes
        while self._num_bytes > self._most_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.memory_size_bytes


def reason_of(error: Exception) -> str:
    """Return what is wrong with a grammar, without the place in xgrammar's source."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if line.startswith("[") and ": " in line:
        line = line.partition(": ")[2]
    return line.strip()[:300]
