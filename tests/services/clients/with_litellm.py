"""Chats and completes through LiteLLM, in an environment of its own. Prints what it gets as JSON. Argument: the URL."""

import json
import sys
from typing import Any

import litellm

QUESTION = [{"role": "user", "content": "Say something."}]
options: dict[str, Any] = {
    "model": "openai/tiny-target", "messages": QUESTION, "api_base": sys.argv[1], "api_key": "unused",
    "temperature": 0.9, "seed": 11, "max_tokens": 12, "stop": ["zzzz"], "num_retries": 0,
}  # fmt: skip
answer = litellm.completion(**options)
chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
found = {
    "text": answer.choices[0].message.content,
    "tokens": answer.usage.completion_tokens,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "streamed tokens": next(chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)),
}
try:
    litellm.completion(**(options | {"model": "openai/nobody"}))
except Exception as error:
    found["error"] = type(error).__name__
print(json.dumps(found))
