"""A model as the bridge knows it: from what its server says, never from its files."""

from dataclasses import dataclass, field
from functools import cached_property

from bridge.spelled import Spelled
from bridge.vocabulary import Vocabulary


@dataclass(frozen=True)
class SpecialIds:
    """Ids that play a role. `eos`: all that end a text or a turn, the tokenizer's own first."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True)
class Model:
    """Who a model is."""

    name: str
    context_length: int
    vocabulary_size: int
    vocabulary: Vocabulary = field(repr=False)
    special_ids: SpecialIds = SpecialIds()
    chat_template: str = ""

    @cached_property
    def markup(self) -> Spelled:
        """Added tokens that make a chat's form, and that nothing said in it may spell.

        Control tokens, ends of text, and what the chat template writes, flagged as special or not.
        """
        words = self.vocabulary
        ends = {words.name(id_) for id_ in self.special_ids.eos}
        added = (token.content for token in words.added.values())
        written = {text for text in added if text.strip() and text in self.chat_template}
        return Spelled(words.control_texts | ends | written)

    def has(self, id_: int) -> bool:
        """Whether there is a token of that id, and the model can choose it."""
        words = self.vocabulary
        return 0 <= id_ < min(words.size, self.vocabulary_size) and words.tokens[id_] is not None

    @property
    def control(self) -> dict[str, str]:
        """Variables that chat templates use for control tokens."""
        ids = self.special_ids
        written = {"bos_token": ids.bos, "eos_token": ids.eos[0] if ids.eos else None, "pad_token": ids.pad}
        return {key: "" if id_ is None else self.vocabulary.name(id_) for key, id_ in written.items()}

    def counterpart(self, id_: int, source: "Model") -> int | None:
        """This model's control token for the control token `id_` of `source`: that of the same role, or name."""
        here, there = self.special_ids, source.special_ids
        if id_ == there.bos and here.bos is not None:
            return here.bos
        if id_ in there.eos and here.eos:
            return here.eos[0]
        return self.vocabulary.control_id(source.vocabulary.name(id_))
