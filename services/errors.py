"""Defines the errors of processes: of names, limits, keys and connections. They extend the tree of `bridge.errors`.

::

    DraftBridgeError
    ├── ModelNotFound
    ├── NotReady
    │   ├── BaseMismatch, RoleNotServed, ModelChanged, EngineNameTaken, PairRefused, GrammarNotSupported
    │   └── UnusableModel
    │       └── ChecksumMismatch, DamagedFile, TemplateLimitExceeded, TrialUnfinished
    ├── Exhausted               the same request may succeed a moment later
    │   └── SlotsExhausted, BridgeBusy, SandboxBusy, TokenizersFull, Overloaded, KeyLimitReached
    ├── Unauthenticated         the call's token is missing, unknown or expired
    └── Unreachable
        └── StreamEnded, DraftAway, TlsFailed, TokenRefused
"""

from math import ceil
from typing import ClassVar

from bridge.errors import DraftBridgeError, NotReady, Unreachable, UnusableModel


class ModelNotFound(DraftBridgeError, reason="MODEL_NOT_FOUND"):
    """No model has that name."""


class BaseMismatch(NotReady, reason="BASE_MISMATCH"):
    def __init__(self, base: int, held: int) -> None:
        super().__init__(
            f"the run keeps {base} tokens, but the target holds {held}: resend it with base_token_count 0 and all ids",
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


class PairRefused(NotReady, reason="PAIR_REFUSED"):
    def __init__(self, target: str, draft: str, refusal: str) -> None:
        super().__init__(
            f"{target} cannot be paired with {draft}: {refusal}, or leave out the name of the draft",
            target=target,
            draft=draft,
        )


class ModelChanged(NotReady, reason="MODEL_CHANGED"):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model}'s tokenizer has changed since the bridge loaded it: try again; it is being read",
            model=model,
        )


class EngineNameTaken(NotReady, reason="ENGINE_NAME_TAKEN"):
    def __init__(self, engine: str) -> None:
        super().__init__(
            f"another engine named {engine!r} is connected: give each engine a name that no other one has",
            engine=engine,
        )


class GrammarNotSupported(NotReady, reason="GRAMMAR_NOT_SUPPORTED"):
    def __init__(self, model: str, field: str) -> None:
        super().__init__(
            f"{model}'s service does not support grammars: choose a target whose description has `grammars`, or send "
            f"the request without {field}",
            model=model,
            field=field,
        )


class ChecksumMismatch(UnusableModel, reason="CHECKSUM_MISMATCH"):
    """A file's content does not match what was announced."""


class DamagedFile(UnusableModel):
    """A model's file is damaged, incomplete or of an unknown architecture, so no engine can use it."""


class TrialUnfinished(UnusableModel):
    """A trial of a model ended for want of time or memory, so another one may succeed."""


class TemplateLimitExceeded(UnusableModel, reason="TEMPLATE_LIMIT_EXCEEDED"):
    """A chat template exceeds a limit on time, memory or text."""

    def __init__(self, limit: str, allowed: str) -> None:
        super().__init__(
            f"the model's chat template takes more than {allowed} for this chat: fix the template, shorten the chat, "
            "or send a prompt instead",
            limit=limit,
            allowed=allowed,
        )


class Exhausted(DraftBridgeError, reason="EXHAUSTED"):
    """The same request may succeed a moment later, after `retry_seconds`. `remedy`: what else helps."""

    retry_seconds: ClassVar[float] = 1.0

    def __init__(self, problem: str, remedy: str, retry_seconds: float = retry_seconds, **metadata: object) -> None:
        shown = ceil(10 * retry_seconds) / 10  # not rounded down: a try after that time would be too early
        text = f"{problem}: try again in {shown:.1f} s, {remedy}"
        super().__init__(text, **metadata, retry_seconds=retry_seconds)


class SlotsExhausted(Exhausted, reason="SLOTS_EXHAUSTED"):
    """A model server is full."""

    def __init__(self, count: int, waiting: int | None = None) -> None:
        """`waiting`: the length of its queue, which is full; None if it has no queue."""
        problem, remedy = f"all {count} slots of this model server are in use", "or start it with more --slots"
        if waiting is not None:
            problem, remedy = f"{problem}, and its queue of {waiting} requests is full", f"{remedy} or a longer --queue"
        super().__init__(problem, remedy, slot_count=count, queue_limit=waiting or 0)


class BridgeBusy(Exhausted, reason="BRIDGE_BUSY"):
    """The bridge runs as many requests as it may."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"this bridge runs {limit} requests already", "or start it with more --max-requests", limit=limit
        )


class SandboxBusy(Exhausted, reason="SANDBOX_BUSY"):
    """The sandbox cannot run the model's chat template, try a grammar, or read a tokenizer, now."""

    def __init__(
        self, detail: str, task: str = "run the model's chat template", remedy: str = "or send a prompt instead"
    ) -> None:
        super().__init__(f"the sandbox cannot {task} now ({detail})", remedy)


class TokenizersFull(Exhausted, reason="TOKENIZERS_FULL"):
    """The tokenizers of connected engines leave no room for another one."""

    def __init__(self, limit_bytes: int) -> None:
        problem = f"the tokenizers of the connected engines fill the {limit_bytes} bytes for them"
        super().__init__(problem, "or start the bridge with a larger --guest-memory", limit_bytes=limit_bytes)


class Overloaded(Exhausted, reason="OVERLOADED"):
    def __init__(self, limit: int) -> None:
        problem = f"this server already runs {limit} calls"
        super().__init__(problem, "or start it with a higher --call-limit", call_limit=limit)


class KeyLimitReached(Exhausted, reason="KEY_LIMIT_REACHED"):
    def __init__(self, key: str, limit: str, retry_seconds: float) -> None:
        problem, remedy = f"the key {key} has reached its limit of {limit}", "or ask the operator of this server"
        super().__init__(problem, f"{remedy} for a higher limit", retry_seconds, key=key, limit=limit)


class Unauthenticated(DraftBridgeError, reason="UNAUTHENTICATED"):
    """The call's token is missing, unknown or expired."""


class TlsFailed(Unreachable, reason="TLS_FAILED"):
    text = (
        "no secure connection to {address} ({detail}): check that both sides use TLS, and that the certificate of "
        "each is valid now, for its address and of an authority that the other trusts"
    )


class TokenRefused(Unreachable, reason="TOKEN_REFUSED"):
    """A service refuses the token of the process that asks it, which is not the client's fault."""

    text = (
        "{address} refuses the token of the process that asks it ({detail}): give the bridge (--service-token-file) or "
        "`draftbridge http` (--bridge-token-file) a token that the keys file of {address} lists"
    )


class SlowDownload(Unreachable):
    """A service answers, but sends its tokenizer too slowly, or not to the end."""

    text = (
        "the tokenizer of the model at {address} was being loaded, but {detail}: check the network to that machine, "
        "and whether its processors are overloaded; the bridge keeps trying"
    )


class StreamEnded(Unreachable):
    """A service has ended a stream while messages were sent to it, so that its reason is lost: often it was full."""

    def __init__(self, address: str) -> None:
        DraftBridgeError.__init__(
            self,
            f"{address} ended a stream before it had read all of it, often because it is full: try again in "
            f"{Exhausted.retry_seconds} s",
            address=address,
            retry_seconds=Exhausted.retry_seconds,
        )


class DraftAway(Unreachable, reason="DRAFT_AWAY"):
    """A request names an unknown draft, which may be the one whose service the bridge cannot reach."""

    def __init__(self, name: str, address: str, problem: str) -> None:
        DraftBridgeError.__init__(
            self,
            f"draft {name!r} is not available; the bridge is still waiting for the draft configured at {address} "
            f"({problem}): start it there, or send the request without a draft name",
            draft=name,
            address=address,
        )
