"""Defines a model as its server reports it; the bridge never reads a model's files."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Protocol, TypeVar, TypeVarTuple

from bridge.errors import PromptTooLong
from bridge.text.string_matcher import StringMatcher
from bridge.text.vocabulary import Marks, Rendering, Vocabulary

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class SpecialIds:
    """The ids that have a role. `eos` lists all ids that end a text or a turn, the tokenizer's own first."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


class TemplateRunner(Protocol):
    """Runs chat templates, which are untrusted programs, in a place and with limits of its choice. It may block."""

    def __call__(self, template: str, variables: Mapping[str, Any], marks: str, shield: Callable[[str], str]) -> str:
        """Returns the text that a Jinja template makes of `variables`, which are JSON values.

        The characters `marks` in them are not part of the values. The template's `tojson` removes them and applies
        `shield` to its result, which may insert new ones. Raises `InvalidField` for a template that refuses the chat,
        `UnusableModel` for one that fails.
        """


@dataclass(frozen=True)
class Model:
    """A model's identity, limits and vocabulary. `vocabulary_size` is the width of its logits.

    `forward_costs`: pairs of a number of tokens and the nanoseconds of such a forward, as its server measured them.
    `compute_units`: names of the cores or accelerators that its forwards may run on, `compute_unit_count` of them at a
    time. The names are unique among machines; the set is empty if the server does not know them.
    `branches`: as a target, it verifies branches.
    `run_template` is required for chats if the model has a chat template.
    """

    name: str
    context_length: int
    vocabulary_size: int
    vocabulary: Vocabulary = field(repr=False)
    special_ids: SpecialIds = SpecialIds()
    chat_template: str = ""
    forward_costs: tuple[tuple[int, int], ...] = ()
    compute_units: frozenset[str] = frozenset()
    compute_unit_count: int = 0
    branches: bool = False
    run_template: TemplateRunner | None = field(default=None, repr=False, compare=False)

    @cached_property
    def markup(self) -> StringMatcher:
        """Finds the tokens that structure a chat, which text in a message must never become.

        These are special tokens, eos ids, and the added tokens that the chat template writes, special or not.
        """
        words = self.vocabulary
        ends = {words.name(id_) for id_ in self.special_ids.eos}
        return StringMatcher(words.controls.strings | ends | self._written)

    @cached_property
    def looked_for(self) -> frozenset[str]:
        """Returns the added tokens, not special ones, that the chat template looks for in texts, such as `</think>`.

        They divide the assistant's text, of which a template may leave out a part.
        """
        words = self.vocabulary
        ends = {words.name(id_) for id_ in self.special_ids.eos}
        return frozenset(
            text for text in self._written - words.controls.strings - ends if _looks_for(self.chat_template, text)
        )

    @property
    def _written(self) -> set[str]:
        """The added tokens that the chat template contains."""
        added = (token.content for token in self.vocabulary.added.values())
        return {text for text in added if text.strip() and text in self.chat_template}

    @property
    def id_limit(self) -> int:
        """Returns the number that all ids of the model are below; not all below it need have a token."""
        return min(self.vocabulary.size, self.vocabulary_size)

    def has(self, id_: int) -> bool:
        """Returns whether a token has this id and the model can produce it."""
        return self.has_all((id_,))

    def has_all(self, ids: Sequence[int]) -> bool:
        """Returns whether `has` is true for all of these ids; fast enough for a long prompt."""
        missing = self.vocabulary.missing
        return not ids or (min(ids) >= 0 and max(ids) < self.id_limit and missing.isdisjoint(ids))

    def competes_with(self, other: "Model") -> bool:
        """Returns whether the two models share cores or accelerators and together need more than they have."""
        needed, units = self.compute_unit_count + other.compute_unit_count, self.compute_units | other.compute_units
        return not self.compute_units.isdisjoint(other.compute_units) and needed > len(units)

    @property
    def control(self) -> dict[str, str]:
        """Returns the variables by which chat templates refer to control tokens."""
        ids = self.special_ids
        named = {"bos_token": ids.bos, "eos_token": ids.eos[0] if ids.eos else None, "pad_token": ids.pad}
        return {name: "" if id_ is None else self.vocabulary.name(id_) for name, id_ in named.items()}

    def prompt(self, text: str, marks: Marks | None = None, *, framed: bool) -> Rendering:
        """Returns `Vocabulary.prompt` of a text.

        Raises `PromptTooLong`, before the whole is encoded, for a text that surely exceeds the context.
        """
        context = self.context_length
        if least := self.vocabulary.min_count(text, marks, context):
            raise PromptTooLong(least, context, self.name, at_least=True)
        return self.vocabulary.prompt(text, marks, framed=framed, max_kept_tokens=context - 1)

    def counterpart(self, id_: int, source: "Model") -> int | None:
        """Returns this model's control token with the role or, failing that, the name of `source`'s token `id_`."""
        here, there = self.special_ids, source.special_ids
        if id_ == there.bos and here.bos is not None:
            return here.bos
        if id_ in there.eos and here.eos:
            return here.eos[0]
        return self.vocabulary.control_id(source.vocabulary.name(id_))


# Methods of texts by which a template looks for a string.
_LOOKS = "split|rsplit|partition|rpartition|find|index|startswith|endswith|replace|count"


def _looks_for(template: str, text: str) -> bool:
    """Returns whether a template divides texts at a string, or asks whether they contain it."""
    quoted = rf"""(?:'{re.escape(text)}'|"{re.escape(text)}")"""
    called = rf"\.(?:{_LOOKS})\s*\(\s*(?:\w+\s*=\s*)?{quoted}"
    return re.search(rf"{called}|{quoted}\s*(?:not\s+)?in\b", template) is not None


def derived(function: Callable[[Model, *Ts], T]) -> Callable[[Model, *Ts], T]:
    """Caches what a function derives from a model in the model itself: a cache elsewhere would keep its vocabulary.

    Of a function with further arguments, the latest result is kept.
    """
    name = f"_{function.__name__}"

    @wraps(function)
    def cached(model: Model, *args: *Ts) -> T:
        known: tuple[tuple[object, ...], T] | None = vars(model).get(name)
        if known is None or known[0] != args:
            known = vars(model)[name] = args, function(model, *args)
        return known[1]

    return cached
