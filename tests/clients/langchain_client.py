"""langchain-openai, in an environment of its own: ``python -m unittest langchain_client``."""

from __future__ import annotations

import asyncio
import json
import os
import unittest
import urllib.error
import urllib.request
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

SERVER = os.environ["DFLASH_URL"]
MODEL = os.environ["DFLASH_MODEL"]
SCRIPTED = os.environ["DFLASH_SCRIPTED_URL"]
QUESTION = "Tom has 3 apples and buys 4 more. How many apples now?"


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def chat(**options: Any) -> ChatOpenAI:
    values = {"temperature": 0, "max_tokens": 60, "max_retries": 0, "stream_usage": True, **options}
    return ChatOpenAI(model=MODEL, base_url=f"{SERVER}/v1", api_key="none", **values)


def talker(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="demo/model", base_url=f"{SCRIPTED}/v1", api_key="none", max_retries=0, **options
    )


def has_guided_decoding() -> bool:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 1,
        "response_format": {"type": "json_object"},
    }
    request = urllib.request.Request(
        f"{SERVER}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as error:
        return bool(json.load(error)["error"]["code"] != "unsupported_parameter")
    return True


class LangChain(unittest.TestCase):
    def test_chat_is_the_same_with_and_without_speculation(self) -> None:
        plain = chat(extra_body={"dflash": {"policy": "off"}}).invoke(QUESTION)
        fast = chat(extra_body={"dflash": {"policy": "static:8"}}).invoke(QUESTION)
        self.assertTrue(plain.content)
        self.assertEqual(fast.content, plain.content)
        self.assertEqual(
            fast.usage_metadata["output_tokens"], plain.usage_metadata["output_tokens"]
        )

    def test_a_stream_adds_up_to_the_whole(self) -> None:
        whole = chat().invoke(QUESTION)
        chunks = list(chat().stream(QUESTION))
        self.assertEqual("".join(chunk.content for chunk in chunks), whole.content)
        used = sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata)
        self.assertEqual(used, whole.usage_metadata["output_tokens"])

    def test_async_and_batches(self) -> None:
        prompts = [f"{QUESTION} And {i} pears?" for i in range(3)]

        async def run() -> list[str]:
            answers = await asyncio.gather(*(chat().ainvoke(prompt) for prompt in prompts))
            return [answer.content for answer in answers]

        self.assertEqual(asyncio.run(run()), [one.content for one in chat().batch(prompts)])

    def test_logprobs(self) -> None:
        answer = chat(logprobs=True, top_logprobs=2, max_tokens=8).invoke(QUESTION)
        entries = answer.response_metadata["logprobs"]["content"]
        self.assertEqual(len(entries), answer.usage_metadata["output_tokens"])
        self.assertEqual(len(entries[0]["top_logprobs"]), 2)

    def test_completions(self) -> None:
        model = OpenAI(
            model=MODEL, base_url=f"{SERVER}/v1", api_key="none", temperature=0, max_tokens=8
        )
        whole = model.invoke("Tom has")
        self.assertTrue(whole)
        self.assertEqual("".join(model.stream("Tom has")), whole)

    def test_tools(self) -> None:
        model = talker().bind_tools([add])
        question = HumanMessage("add")
        for asked in (model.invoke([question]), sum_of(model.stream([question]))):
            (call,) = asked.tool_calls
            self.assertEqual((call["name"], call["args"]), ("add", {"a": 1, "b": 2}))
            result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
            answer = model.invoke([question, asked, result])
            self.assertEqual(answer.content, "The sum is 3.")

    def test_errors(self) -> None:
        with self.assertRaisesRegex(openai.BadRequestError, "temperature"):
            chat(temperature=3).invoke(QUESTION)
        with self.assertRaises(openai.APIError) as caught:
            list(talker().stream("break"))
        self.assertEqual(caught.exception.code, "engine_unavailable")

    def test_json_schema(self) -> None:
        if not has_guided_decoding():
            self.skipTest("no guided decoding yet")
        schema = {
            "title": "answer",
            "type": "object",
            "properties": {"answer": {"type": "integer", "enum": [3, 4, 7]}},
            "required": ["answer"],
            "additionalProperties": False,
        }
        model = chat().with_structured_output(schema, method="json_schema")
        self.assertIsInstance(model.invoke(QUESTION)["answer"], int)


def sum_of(chunks: Any) -> Any:
    total = None
    for chunk in chunks:
        total = chunk if total is None else total + chunk
    return total


if __name__ == "__main__":
    unittest.main()
