"""A drafter is trained on the very tokens that are served: prompts of one template, thinking or not."""

from __future__ import annotations

from local_engines import ROOT
from transformers import PreTrainedTokenizerFast

from drafter.training.demo.corpus import Conversation
from drafter.training.demo.target import encode_conversation
from drafter.training.demo.tokenizer import CHAT_TEMPLATE
from gateway.chat_tokenizer import ChatTokenizer


def test_training_and_serving_write_a_conversation_alike() -> None:
    path = str(ROOT / "models/demo/target")
    trained = PreTrainedTokenizerFast.from_pretrained(path)
    served = ChatTokenizer.load(path)
    assert served.chat_template == CHAT_TEMPLATE
    row = Conversation("chat", "What is 2 + 2?\n\nThink  first. ", " It is 4.")
    example = encode_conversation(trained, row)
    asked = [{"role": "user", "content": row.user}]
    assert served._encode_chat(asked) == example.token_ids[: example.loss_start]
    said = [*asked, {"role": "assistant", "content": row.assistant}]
    follow_up = served._encode_chat([*said, {"role": "user", "content": "Sure?"}])
    assert follow_up[: len(example.token_ids)] == example.token_ids, "the next turn begins with it"
