"""Everything that a user, a client or a peer can cause to fail, as one tree.

::

    DraftBridgeError
    ├── InvalidRequest          the request is wrong, and would be wrong again
    │   └── InvalidField, EmptyPrompt, PromptTooLong, MaxTokensTooLarge, TokenOutOfRange, ProtocolViolation
    ├── ModelNotFound
    ├── NotReady                the request is right, but the other side cannot serve it as it is now
    │   ├── BaseMismatch, RoleNotServed, ModelChanged
    │   └── UnusableModel       a model's files are there, but are broken or not supported
    │       └── TokenizerNotUnderstood, TemplateLimitExceeded, ChecksumMismatch
    ├── Exhausted               the same request may succeed a moment later
    │   └── SlotsExhausted, SandboxBusy
    ├── Unreachable             a service does not answer, or no longer
    │   └── DraftAway
    ├── EngineFailure           a forward failed
    └── TargetFault             a target answers what the contract rules out

An error's text names the remedy. `reason` names the error for programs and travels over gRPC as `ErrorInfo.reason`;
`metadata` travels as `ErrorInfo.metadata`. Errors of a process's start are defined where they are raised.
"""

from typing import ClassVar


class DraftBridgeError(Exception):
    """Base of all errors. `metadata` holds the values that the text mentions."""

    reason: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls, reason: str | None = None) -> None:
        if reason is not None:
            cls.reason = reason

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(DraftBridgeError, reason="INVALID_REQUEST"):
    """The request is wrong, and would be wrong again."""


class InvalidField(InvalidRequest, reason="INVALID_FIELD"):
    def __init__(self, field: str, allowed: str, got: object) -> None:
        super().__init__(f"{field} must be {allowed}, got {got}", field=field, allowed=allowed)


class EmptyPrompt(InvalidRequest, reason="EMPTY_PROMPT"):
    def __init__(self) -> None:
        super().__init__(
            "there is nothing to continue: give a prompt, chat messages or token ids that make at least one token"
        )


class PromptTooLong(InvalidRequest, reason="PROMPT_TOO_LONG"):
    def __init__(self, prompt: int, context: int, model: str) -> None:
        super().__init__(
            f"the prompt has {prompt} tokens, {model} has a context of {context}, and one must be left "
            f"to generate: shorten the prompt to {context - 1} tokens or choose a model with a longer context",
            prompt_token_count=prompt,
            context_length=context,
        )


class MaxTokensTooLarge(InvalidRequest, reason="MAX_TOKENS_TOO_LARGE"):
    def __init__(self, max_tokens: int, prompt: int, context: int, model: str) -> None:
        super().__init__(
            f"max_tokens {max_tokens} does not fit after {prompt} prompt tokens in {model}'s context of "
            f"{context}: ask for at most {context - prompt}, or leave max_tokens unset",
            max_tokens=max_tokens,
            prompt_token_count=prompt,
            context_length=context,
        )


class TokenOutOfRange(InvalidRequest, reason="TOKEN_OUT_OF_RANGE"):
    def __init__(self, token_id: int, size: int, model: str) -> None:
        super().__init__(
            f"token id {token_id} is outside {model}'s vocabulary: its {size} ids go from 0 to {size - 1}",
            token_id=token_id,
            vocabulary_size=size,
        )


class ProtocolViolation(InvalidRequest, reason="PROTOCOL_VIOLATION"):
    """A peer sent messages in an order, or with contents, that the contract rules out."""


class ModelNotFound(DraftBridgeError, reason="MODEL_NOT_FOUND"):
    """Nothing has a model of that name."""


class NotReady(DraftBridgeError, reason="NOT_READY"):
    """The request is right, but the other side cannot serve it as it is now."""


class BaseMismatch(NotReady, reason="BASE_MISMATCH"):
    def __init__(self, base: int, held: int) -> None:
        super().__init__(
            f"the run keeps {base} tokens, the target holds {held}: send it again with base_token_count 0 and all ids",
            base_token_count=base,
            held_token_count=held,
        )


class RoleNotServed(NotReady, reason="ROLE_NOT_SERVED"):
    def __init__(self, address: str, model: str, role: str) -> None:
        super().__init__(
            f"{address} does not serve {model} as a {role}: start it with --role {role} or --role both",
            address=address,
            model=model,
            role=role,
        )


class ModelChanged(NotReady, reason="MODEL_CHANGED"):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} now has another tokenizer than when the bridge asked for it: restart the bridge", model=model
        )


class UnusableModel(NotReady, reason="UNUSABLE_MODEL"):
    """A model's files are there, but cannot be served."""


class TokenizerNotUnderstood(UnusableModel, reason="TOKENIZER_NOT_UNDERSTOOD"):
    """A tokenizer is broken, hostile, or of a kind that no byte table can be made of."""


class ChecksumMismatch(UnusableModel, reason="CHECKSUM_MISMATCH"):
    """A file's content is not what was announced."""


class TemplateLimitExceeded(UnusableModel, reason="TEMPLATE_LIMIT_EXCEEDED"):
    """A chat template takes more time, memory or text than a template may take."""

    def __init__(self, limit: str, allowed: str) -> None:
        super().__init__(
            f"the model's chat template takes more than {allowed} for this chat: mend the template, shorten the chat, "
            "or send a prompt instead",
            limit=limit,
            allowed=allowed,
        )


class Exhausted(DraftBridgeError, reason="EXHAUSTED"):
    """The same request may succeed a moment later. `retry_seconds`: when to try again."""

    retry_seconds: ClassVar[float] = 1.0


class SlotsExhausted(Exhausted, reason="SLOTS_EXHAUSTED"):
    """A model server is full."""

    def __init__(self, count: int, waiting: int) -> None:
        super().__init__(
            f"all {count} sequences that this model server holds at a time are in use, and {waiting} wait for a place: "
            f"try again in {self.retry_seconds} s, or start it with more --slots or a longer --queue",
            slot_count=count,
            queue_limit=waiting,
            retry_seconds=self.retry_seconds,
        )


class Unreachable(DraftBridgeError, reason="SERVICE_UNREACHABLE"):
    def __init__(self, address: str, detail: str) -> None:
        super().__init__(
            f"nothing usable answers at {address} ({detail}): check the address and that the service is running",
            address=address,
        )


class SandboxBusy(Exhausted, reason="SANDBOX_BUSY"):
    """The model's chat template cannot be run now."""

    def __init__(self, detail: str) -> None:
        super().__init__(
            f"the model's chat template cannot be run now ({detail}): try again in {self.retry_seconds} s, or send a "
            "prompt instead of a chat",
            retry_seconds=self.retry_seconds,
        )


class DraftAway(Unreachable, reason="DRAFT_AWAY"):
    """A request names a draft that may be the one that the bridge waits for."""

    def __init__(self, name: str, address: str, problem: str) -> None:
        DraftBridgeError.__init__(
            self,
            f"the bridge cannot use a draft {name!r} now, but waits for one that is configured at {address} "
            f"({problem}): start it there, or name no draft to go on without",
            draft=name,
            address=address,
        )


class EngineFailure(DraftBridgeError, reason="ENGINE_FAILURE"):
    """A forward failed."""


class TargetFault(DraftBridgeError, reason="TARGET_FAULT"):
    """A target answers what the contract rules out."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"the target breaks the protocol: {fault}; use a target service of this version")
