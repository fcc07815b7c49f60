"""Chats through LangChain, in an environment of its own. Prints what it gets as JSON. Argument: the base URL."""

import asyncio
import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Look(BaseModel):
    """Looks something up."""

    what: str


QUESTION = "Say something."
chat = ChatOpenAI(
    base_url=sys.argv[1], api_key="unused", model="tiny-target", temperature=0.9, seed=11, max_tokens=12, max_retries=0,
    stop=["zzzz"], extra_body={"draftbridge": {"mode": "lockstep"}},
)  # fmt: skip


async def streamed() -> list[Any]:
    return [chunk async for chunk in chat.astream(QUESTION, stream_usage=True)]


answer = chat.invoke(QUESTION)
chunks = asyncio.run(streamed())
tools = chat.bind_tools([Look]).invoke(QUESTION)
found = {
    "text": answer.content,
    "tokens": answer.usage_metadata["output_tokens"],
    "streamed": "".join(chunk.content for chunk in chunks),
    "streamed tokens": sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks),
    "several": [one.content for one in chat.batch([QUESTION, QUESTION])],
    "prompt tokens": [one.usage_metadata["input_tokens"] for one in (answer, tools)],
}
try:
    ChatOpenAI(base_url=sys.argv[1], api_key="unused", model="nobody", max_retries=0).invoke(QUESTION)
except Exception as error:
    found["error"] = type(error).__name__
print(json.dumps(found))
