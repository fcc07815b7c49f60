"""Messages of a chat, as clients send them and send answers back."""

from typing import Any, Literal

from bridge.errors import InvalidField
from bridge.text.chat import Message
from services.http.fields import Ignored, JsonObject, List, Strict


class TextPart(Strict):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str
    # A hint for servers that keep a prompt only on request.
    cache_control: Ignored = None


class CalledFunction(Strict):
    """A function that the assistant has called. Text of an object becomes one if the chat template expects that."""

    name: str
    arguments: str | JsonObject
    # OpenAI's package adds what it has parsed to the answers that it returns, here and in messages.
    parsed_arguments: Ignored = None


class EarlierCall(Strict):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    # The place of the call in a stream.
    index: Ignored = None


class ChatMessage(Strict):
    """A message. The chat template receives its fields; those that only answers of others have must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[TextPart] | None = None
    name: str | None = None
    tool_calls: List[EarlierCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: tuple[()] | None = None
    parsed: Ignored = None
    cache_control: Ignored = None
    # By these, clients find a message again.
    id: Ignored = None
    created: Ignored = None
    created_at: Ignored = None
    timestamp: Ignored = None
    metadata: Ignored = None

    def message(self, place: str) -> Message:
        """Returns the message in the bridge's form; its parts of text become lines. `place`: its name in the request.

        Raises `InvalidField`.
        """
        if self.tool_calls and self.role != "assistant":
            raise InvalidField(f"{place}.tool_calls", "left out unless the role is assistant")
        if self.content is None and not self.tool_calls:
            raise InvalidField(f"{place}.content", "a text unless the message has tool_calls", "none")
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        names = {"name", "tool_calls", "tool_call_id", "reasoning_content"}
        fields: dict[str, Any] = self.model_dump(mode="json", include=names, exclude_none=True)
        return Message(self.role, text, fields)
