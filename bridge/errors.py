"""Everything that can go wrong by somebody's doing, as one tree.

::

    DraftBridgeError
    ├── InvalidRequest            what was asked makes no sense; asking again will not help
    │   ├── InvalidField
    │   ├── UnsupportedField
    │   ├── EmptyPrompt
    │   ├── PromptTooLong
    │   ├── MaxTokensTooLarge
    │   ├── TokenOutOfRange
    │   └── ProtocolViolation
    ├── NotFound
    │   └── ModelNotFound
    ├── NotReady                  the request is fine, the other side is not in the state for it
    │   ├── BaseMismatch
    │   ├── RoleNotServed
    │   ├── ModelChanged
    │   ├── CacheUnusable
    │   └── UnusableModel
    │       ├── TokenizerNotUnderstood
    │       └── ChecksumMismatch
    ├── Exhausted
    │   └── SlotsExhausted
    ├── Unreachable               nobody answers there, or no longer
    ├── PortTaken
    └── EngineFailure             a forward failed

The text of each names the remedy. `reason` is the machine's word for it and travels over gRPC as
`ErrorInfo.reason`; `metadata` travels as `ErrorInfo.metadata`.
"""

from typing import ClassVar


class DraftBridgeError(Exception):
    """Base of all. `metadata` holds the values that the text speaks of."""

    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidRequest(DraftBridgeError):
    reason = "INVALID_REQUEST"


class InvalidField(InvalidRequest):
    """A field's value is outside its range."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, allowed: str, got: object) -> None:
        super().__init__(f"{field} must be {allowed}, got {got}", field=field, allowed=allowed)


class UnsupportedField(InvalidRequest):
    """A field of the contract that this version does not implement was set."""

    reason = "UNSUPPORTED_FIELD"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field} is not supported by this version; leave it unset", field=field)


class EmptyPrompt(InvalidRequest):
    reason = "EMPTY_PROMPT"

    def __init__(self) -> None:
        super().__init__(
            "there is nothing to continue: give a prompt, chat messages or token ids that come to at least one token"
        )


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"

    def __init__(self, prompt: int, context: int, model: str) -> None:
        super().__init__(
            f"the prompt has {prompt} tokens, {model} has a context of {context}, and one must be left "
            f"to generate: shorten the prompt to {context - 1} tokens or choose a model with a longer context",
            prompt_token_count=prompt,
            context_length=context,
        )


class MaxTokensTooLarge(InvalidRequest):
    reason = "MAX_TOKENS_TOO_LARGE"

    def __init__(self, max_tokens: int, prompt: int, context: int, model: str) -> None:
        super().__init__(
            f"max_tokens {max_tokens} does not fit behind {prompt} prompt tokens in {model}'s context of "
            f"{context}: ask for at most {context - prompt}, or leave max_tokens unset",
            max_tokens=max_tokens,
            prompt_token_count=prompt,
            context_length=context,
        )


class TokenOutOfRange(InvalidRequest):
    reason = "TOKEN_OUT_OF_RANGE"

    def __init__(self, token_id: int, size: int, model: str) -> None:
        super().__init__(
            f"token id {token_id} is outside {model}'s vocabulary: its {size} ids go from 0 to {size - 1}",
            token_id=token_id,
            vocabulary_size=size,
        )


class ProtocolViolation(InvalidRequest):
    """A peer sent messages in an order, or with contents, that the contract rules out."""

    reason = "PROTOCOL_VIOLATION"


class NotFound(DraftBridgeError):
    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    reason = "MODEL_NOT_FOUND"


class NotReady(DraftBridgeError):
    reason = "NOT_READY"


class BaseMismatch(NotReady):
    """A run keeps more tokens than the target has: resend from zero."""

    reason = "BASE_MISMATCH"

    def __init__(self, base: int, held: int) -> None:
        super().__init__(
            f"the run keeps {base} tokens, the target holds {held}: send it again with base_token_count 0 and all ids",
            base_token_count=base,
            held_token_count=held,
        )


class RoleNotServed(NotReady):
    reason = "ROLE_NOT_SERVED"

    def __init__(self, address: str, model: str, role: str) -> None:
        super().__init__(
            f"{address} does not serve {model} as a {role}: start it with --role {role} or --role both",
            address=address,
            model=model,
            role=role,
        )


class ModelChanged(NotReady):
    """The server now has a model with another tokenizer than the one that the client knows."""

    reason = "MODEL_CHANGED"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} now has another tokenizer than when the bridge asked for it: restart the bridge", model=model
        )


class CacheUnusable(NotReady):
    """Models cannot be kept where they should be."""

    reason = "CACHE_UNUSABLE"

    def __init__(self, directory: object, detail: object) -> None:
        super().__init__(
            f"models cannot be kept in {directory} ({detail}): let the environment's DRAFTBRIDGE_CACHE name a "
            "directory that can be written to",
            directory=directory,
        )


class UnusableModel(NotReady):
    """Files that are there but are no model that can be served."""

    reason = "UNUSABLE_MODEL"


class TokenizerNotUnderstood(UnusableModel):
    reason = "TOKENIZER_NOT_UNDERSTOOD"


class ChecksumMismatch(UnusableModel):
    reason = "CHECKSUM_MISMATCH"


class Exhausted(DraftBridgeError):
    """More was asked for than there is at the moment. `retry_seconds`: when to try again."""

    reason = "EXHAUSTED"
    retry_seconds: ClassVar[float] = 1.0


class SlotsExhausted(Exhausted):
    reason = "SLOTS_EXHAUSTED"

    def __init__(self, count: int, waiting: int) -> None:
        super().__init__(
            f"all {count} sequences that this model server holds at a time are in use, and {waiting} wait for a place: "
            f"try again in {self.retry_seconds} s, or start it with more --slots or a longer --queue",
            slot_count=count,
            queue_limit=waiting,
            retry_seconds=self.retry_seconds,
        )


class Unreachable(DraftBridgeError):
    reason = "SERVICE_UNREACHABLE"

    def __init__(self, address: str, detail: str) -> None:
        super().__init__(
            f"nothing usable answers at {address} ({detail}): check the address and that the service is running",
            address=address,
        )


class PortTaken(DraftBridgeError):
    reason = "PORT_TAKEN"

    def __init__(self, address: str) -> None:
        super().__init__(
            f"{address} cannot be listened on: another program has the port, or the address is not this "
            "machine's; choose another, or port 0 for a free one",
            address=address,
        )


class EngineFailure(DraftBridgeError):
    reason = "ENGINE_FAILURE"
