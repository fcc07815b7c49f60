"""What a user asked for, in the tokens of one model: a text, or a chat in the model's own template."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bridge.errors import InvalidField, UnusableModel
from bridge.translation import Rendering
from bridge.vocabulary import Vocabulary

# For models without a template, instruction tuned or not: a transcript that any language model continues.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


def render_text(vocabulary: Vocabulary, text: str) -> Rendering:
    """A prompt as the model's tokenizer takes it: control tokens understood, beginning of text added."""
    return _render(vocabulary, [text], framed=True)


def render_chat(
    vocabulary: Vocabulary, template: str, messages: Sequence[Message], control: dict[str, str]
) -> Rendering:
    """A chat in the model's own template (plain transcript if empty), ready for the assistant's turn.

    `control`: the template's `bos_token`, `eos_token` and so on. A control token spelled in a message is
    plain text: it is broken with a mark that no message contains before rendering, and encoded in two parts.
    """
    mark = _unused_mark(messages)
    shielded = [
        {"role": _shield(message.role, vocabulary, mark), "content": _shield(message.content, vocabulary, mark)}
        for message in messages
    ]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    variables: dict[str, Any] = {"messages": shielded, "add_generation_prompt": True, **control}
    try:
        text = environment.from_string(template or PLAIN_TEMPLATE).render(variables)
    except _RefusedError as error:
        raise InvalidField("chat.messages", f"as the model's chat template wants them ({error})", "others") from error
    except Exception as error:  # a template is a program, and can fail like any
        raise UnusableModel(
            f"the model's chat template failed ({type(error).__name__}: {error}): mend the template, or send a prompt "
            "instead of a chat"
        ) from error
    # A template writes its own beginning of text; the plain transcript gets the tokenizer's.
    return _render(vocabulary, text.split(mark), framed=not template)


def render_bytes(vocabulary: Vocabulary, data: bytes, bos: int | None) -> Rendering:
    """A prompt of which only the bytes are known, as the start of a text behind `bos`."""
    head = () if bos is None else (bos,)
    return Rendering(head, data, head + tuple(vocabulary.pieces(data, whole=True).ids))


class _RefusedError(Exception):
    """A template refuses a chat, for instance because roles do not alternate."""


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


class _GenerationTag(Extension):
    """`{% generation %}` marks, for training, what the assistant said; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  # as the library declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body, as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _shield(text: str, vocabulary: Vocabulary, mark: str) -> str:
    for control in vocabulary.control_texts:
        text = text.replace(control, control[:1] + mark + control[1:])
    return text


def _unused_mark(messages: Sequence[Message]) -> str:
    said = "".join(message.role + message.content for message in messages)
    # Noncharacters: Unicode reserves them for use inside a program.
    return next(mark for code in range(0xFDD0, 0xFDF0) if (mark := chr(code)) not in said or code == 0xFDEF)


def _render(vocabulary: Vocabulary, segments: Sequence[str], framed: bool) -> Rendering:
    """Encodes segments one by one, the first as the start of a text, what the tokenizer puts in front kept."""
    ids: list[int] = []
    head, text = 0, b""
    for index, segment in enumerate(segments):
        encoding = vocabulary.encode(segment, whole=index == 0, framed=framed and index == 0)
        count = len(encoding.ids)
        # A tokenizer that closes every text with its end-of-text would end the prompt.
        while count > 1 and encoding.special_tokens_mask[count - 1] and encoding.offsets[count - 1] == (0, 0):
            count -= 1
        control = vocabulary.special - {vocabulary.unknown}
        last = max((i for i in range(count) if encoding.ids[i] in control), default=-1)
        if last >= 0:
            head = len(ids) + last + 1
            text = segment[encoding.offsets[last][1] :].encode()
        else:
            text += segment.encode()
        ids += encoding.ids[:count]
    return Rendering(tuple(ids[:head]), text, tuple(ids))
