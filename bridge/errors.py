"""Defines the errors of requests, of models and of peers that the algorithm raises, as one tree.

::

    DraftBridgeError
    ├── InvalidRequest          the request is invalid, and a retry cannot succeed
    │   └── InvalidField, InvalidGrammar, EmptyPrompt, PromptTooLong, MaxTokensTooLarge, TokenOutOfRange,
    │       ProtocolViolation
    ├── NotReady                the request is valid, but the other side cannot serve it in its present state
    │   └── UnusableModel       a model's files exist, but are broken or not supported
    │       └── TokenizerNotUnderstood
    ├── Unreachable             a service does not answer, or has stopped answering
    ├── EngineFailure           a forward failed
    │   └── BrokenLogits        it gave no numbers
    └── TargetFault             a target's answer violates the contract

`services.errors` adds those of processes. An error's text names the remedy. `reason` identifies the error for programs
and is sent over gRPC as `ErrorInfo.reason`; `metadata` is sent as `ErrorInfo.metadata`. Startup errors are defined
where they are raised.
"""

from collections.abc import Callable
from typing import ClassVar


class DraftBridgeError(Exception):
    """The base of all errors. `metadata` holds the values that the text mentions."""

    reason: ClassVar[str] = "INTERNAL"

    def __init_subclass__(cls, reason: str | None = None) -> None:
        if reason is not None:
            cls.reason = reason

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


def require(holds: bool, error: Callable[..., DraftBridgeError], *details: object) -> None:
    """Raises `error(*details)` unless a check holds."""
    if not holds:
        raise error(*details)


class InvalidRequest(DraftBridgeError, reason="INVALID_REQUEST"):
    """The request is invalid, and a retry cannot succeed."""


class InvalidField(InvalidRequest, reason="INVALID_FIELD"):
    def __init__(self, field: str, allowed: str, got: object = None) -> None:
        found = "" if got is None else f", got {got}"
        super().__init__(f"{field} must be {allowed}{found}", field=field, allowed=allowed)


class InvalidGrammar(InvalidRequest, reason="INVALID_GRAMMAR"):
    """A grammar is broken, exceeds a limit, or cannot be satisfied. `problem` names the place and the remedy."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}", field=field)


class EmptyPrompt(InvalidRequest, reason="EMPTY_PROMPT"):
    def __init__(self) -> None:
        super().__init__("there is nothing to continue: send a prompt, chat or token ids of at least one token")


class PromptTooLong(InvalidRequest, reason="PROMPT_TOO_LONG"):
    def __init__(self, prompt: int, context: int, model: str, *, at_least: bool = False) -> None:
        count = f"at least {prompt}" if at_least else prompt
        super().__init__(
            f"the prompt has {count} tokens, and {model}'s context of {context} tokens must leave one to "
            f"generate: shorten the prompt to {context - 1} tokens or choose a model with a longer context",
            prompt_token_count=prompt,
            context_length=context,
        )


class MaxTokensTooLarge(InvalidRequest, reason="MAX_TOKENS_TOO_LARGE"):
    def __init__(self, max_tokens: int, prompt: int, context: int, model: str) -> None:
        super().__init__(
            f"max_tokens {max_tokens} does not fit after {prompt} prompt tokens in {model}'s context of "
            f"{context} tokens: request at most {context - prompt}",
            max_tokens=max_tokens,
            prompt_token_count=prompt,
            context_length=context,
        )


class TokenOutOfRange(InvalidRequest, reason="TOKEN_OUT_OF_RANGE"):
    def __init__(self, token_id: int, size: int, model: str) -> None:
        super().__init__(
            f"token id {token_id} is not in {model}'s vocabulary: use ids from 0 to {size - 1} that have a token",
            token_id=token_id,
            vocabulary_size=size,
        )


class ProtocolViolation(InvalidRequest, reason="PROTOCOL_VIOLATION"):
    """A peer's messages violate the contract by their order or content."""


class NotReady(DraftBridgeError, reason="NOT_READY"):
    """The request is valid, but the other side cannot serve it in its present state."""


class UnusableModel(NotReady, reason="UNUSABLE_MODEL"):
    """A model's files exist, but are broken or not supported."""


class TokenizerNotUnderstood(UnusableModel, reason="TOKENIZER_NOT_UNDERSTOOD"):
    """A tokenizer is broken or hostile, or its ids do not stand for fixed bytes."""


class Unreachable(DraftBridgeError, reason="SERVICE_UNREACHABLE"):
    text: ClassVar[str] = (
        "no usable service answers at {address} ({detail}): check the address, that the service is running, and that "
        "it and its client both use TLS or both do not; with mutual TLS, also its client's certificate"
    )

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(self.text.format(address=address, detail=detail), address=address)


class EngineFailure(DraftBridgeError, reason="ENGINE_FAILURE"):
    """A forward of the model failed."""


class BrokenLogits(EngineFailure):
    """A forward gave logits that are not numbers, so what it has cached is not to be trusted either."""

    def __init__(self, best: float) -> None:
        super().__init__(
            f"the model's best logit is {best}: its weights are damaged or overflow in this dtype; try float32"
        )


class TargetFault(DraftBridgeError, reason="TARGET_FAULT"):
    """A target's answer violates the contract."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"the target violates the protocol: {fault}; use a target service of the bridge's version")
