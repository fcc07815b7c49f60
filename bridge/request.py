"""Defines a user's request, checks it before anything runs, and renders its prompt in a model's tokens."""

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property

from bridge.errors import EmptyPrompt, InvalidField, MaxTokensTooLarge, PromptTooLong, TokenOutOfRange, require
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.sampling.sampler import SamplingParameters
from bridge.sources import SOURCES
from bridge.text.chat import Chat, byte_count, chat_threads, check_tools, render_chat, render_ids_for, render_text_for
from bridge.text.models import Model
from bridge.text.vocabulary import Rendering
from bridge.threads import threads_for

# The most stop strings, and characters in all of them: after each pass, the end of the text is compared with each of
# their beginnings.
MAX_STOP_STRINGS, MAX_STOP_LENGTH = 64, 4096
# The most characters of the tenant that a client names, and of what a server puts before it: the name of the client's
# key and a slash. Both the bridge and an HTTP door in a process of its own do so.
MAX_TENANT_LENGTH, KEY_PREFIX_LENGTH = 256, 65


@dataclass(frozen=True)
class Request:
    """A user's request. `input`: text, chat or target ids. `tenant`: whose requests may be drafted from the output.

    `reports_progress`: deltas carry the statistics so far, from time to time.
    """

    input: str | Chat | tuple[int, ...]
    sampling: SamplingParameters = SamplingParameters()
    seed: int = field(default_factory=lambda: secrets.randbits(64))
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    speculation: SpeculationParameters = SpeculationParameters()
    tenant: str = ""
    reports_progress: bool = False

    @cached_property
    def input_byte_count(self) -> int:
        """Returns the size of the input, which the time to render it depends on."""
        match self.input:
            case str(text):
                return byte_count(text)
            case Chat() as chat:
                return chat.byte_count
            case ids:
                return 4 * len(ids)


def check(request: Request, has_all: Callable[[Sequence[int]], bool] | None = None) -> None:
    """Raises `InvalidField` or `EmptyPrompt` for a request that no target could serve.

    `has_all` returns whether the target has some ids, if the target is known.
    """
    request.sampling.checked(has_all)
    if not (request.input.messages if isinstance(request.input, Chat) else request.input):
        raise EmptyPrompt
    texts = [request.input] if isinstance(request.input, str) else []
    if isinstance(request.input, Chat):
        texts = [text for one in request.input.messages for text in (one.role, one.content)]
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise InvalidField("the prompt", "Unicode text", "a lone surrogate") from None
    most, least, stop, tenant = request.max_tokens, request.sampling.min_tokens, request.stop, request.tenant
    given, named, length = request.speculation, request.speculation.sources, sum(map(len, stop))
    count, temperature = given.num_assistant_tokens, given.draft_temperature
    threshold, unknown = given.assistant_confidence_threshold, sorted(set(named) - set(SOURCES))
    used = not named or given.mode is Mode.OFF or any(map(given.allows, named))
    for holds, name, allowed, got in (
        (most is None or most >= 1, "max_tokens", "at least 1", most),
        (most is None or least <= most, "sampling.min_tokens", f"at most max_tokens, {most}", least),
        (len(stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", f"{len(stop)} strings"),
        (length <= MAX_STOP_LENGTH, "stop", f"at most {MAX_STOP_LENGTH:,} characters in all strings together", length),
        ("" not in stop, "stop", "made of non-empty strings", "an empty one"),
        ((request.logprobs or 0) <= 100, "logprobs", "at most 100", request.logprobs),
        (count is None or 1 <= count <= 64, "speculation.num_assistant_tokens", "between 1 and 64", count),
        (0.0 <= (temperature or 0.0) <= 100.0, "speculation.draft_temperature", "between 0 and 100", temperature),
        (0.0 <= threshold <= 1.0, "speculation.assistant_confidence_threshold", "between 0 and 1", threshold),
        (not unknown, "speculation.sources", f"a selection of {', '.join(SOURCES)}", ", ".join(unknown)),
        (used, "speculation.sources", f"names of sources that mode {given.mode.value} uses", ", ".join(named)),
    ):
        require(holds, InvalidField, name, allowed, got)
    check_tenant(tenant, 2)


def check_tenant(tenant: str, prefix_count: int) -> None:
    """Raises `InvalidField` for a tenant that is too long, with the names of at most `prefix_count` keys before it."""
    fits = len(tenant) <= MAX_TENANT_LENGTH + prefix_count * KEY_PREFIX_LENGTH
    require(fits, InvalidField, "tenant", f"at most {MAX_TENANT_LENGTH} characters long", len(tenant))


def render(request: Request, model: Model, source: Model) -> Rendering:
    """Returns the request's input in `model`'s tokens. `source` is the target; an input of ids is in its vocabulary."""
    match request.input:
        case str(text):
            return render_text_for(model, text, source)
        case Chat():
            rendering = render_chat(model, request.input)
            if model is source:
                check_tools(model, request.input, rendering)
            return rendering
        case ids:
            return render_ids_for(model, ids, source)


def rendering_threads(request: Request, model: Model) -> Executor | None:
    """Returns the threads that render a request in a model's tokens, see `bridge.threads`."""
    if isinstance(request.input, Chat):
        return chat_threads(model, request.input_byte_count)
    return threads_for(request.input_byte_count)


def token_room(request: Request, model: Model, prompt_ids: Sequence[int]) -> int:
    """Returns the limit on generated tokens. Raises `InvalidRequest` if prompt and limit exceed the model's context."""
    count, context = len(prompt_ids), model.context_length
    if not model.has_all(prompt_ids):
        unknown = next(id_ for id_ in prompt_ids if not model.has(id_))
        raise TokenOutOfRange(unknown, model.id_limit, model.name)
    require(count > 0, EmptyPrompt)
    require(count < context, PromptTooLong, count, context, model.name)
    max_tokens = request.max_tokens or context - count
    require(max_tokens <= context - count, MaxTokensTooLarge, max_tokens, count, context, model.name)
    return max_tokens
