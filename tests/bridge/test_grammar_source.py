"""Tests forced bytes as candidates, alone and with other sources, and that what a grammar refuses is cut off."""

from bridge.planning.estimates import RequestEstimates, TargetEstimates
from bridge.planning.planner import Planner, SpeculationParameters
from bridge.ports import Pass
from bridge.sampling.grammar import Grammar, GrammarKind
from bridge.sources.grammar import GrammarSource
from bridge.sources.source import MAX_OFFERED_BYTES, CandidateSource, Continuation, Offer, Opening, Outcome
from bridge.sources.source_set import SourceSet
from bridge.sources.suffix import SuffixSource
from bridge.tape import Tape
from bridge.text.translation import candidates
from services.grammars.byte_matcher import ByteMatcher, byte_tokenizer
from services.grammars.compiler import compile_grammar
from tests.support import tiny

MODEL = tiny.model("byte_level")
END = 2
BYTES = byte_tokenizer()
RECORD = "full name: [A-Za-z]+; age: [0-9]+;"


class Fixed(CandidateSource):
    """Proposes the same bytes at every position."""

    name = "suffix"
    evidence_edges, prior_chances = (), (0.5,)

    def __init__(self, data: bytes, *, closes: bool = False) -> None:
        self._data, self._closes = data, closes

    @classmethod
    def open(cls, opening: Opening) -> "Fixed":
        raise NotImplementedError  # the test creates the source itself

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        return Continuation(self.name, self._data, closes=self._closes)


def form(regex: str) -> ByteMatcher:
    return ByteMatcher(compile_grammar(BYTES, Grammar(GrammarKind.REGEX, regex)))


def offers(regex: str, committed: bytes, *others: CandidateSource) -> list[tuple[bytes, tuple[str, ...], bool]]:
    """Returns the bytes of each offer, its sources in order, and whether it ends the text."""
    grammar, tape = form(regex), Tape(MODEL.vocabulary, [1])
    sources = SourceSet([GrammarSource(grammar), *others], MODEL, END, grammar=grammar)
    ids = tuple(MODEL.vocabulary.pieces(committed).ids)
    if ids:
        sources.observe(Outcome(Pass(1, ids, 0, 0), Offer(), tape.commit(ids)))
    spell = MODEL.vocabulary.spell
    return [
        (spell(one.token_ids), tuple(dict.fromkeys(one.sources)), one.token_ids[-1] == END) for one in sources.offers()
    ]


def test_forced_bytes_are_offered_alone() -> None:
    assert offers(RECORD, b"full na") == [(b"me: ", ("grammar",), False)]
    assert offers(RECORD, b"full name: Bo") == []
    assert offers(RECORD, b"full name: Bo;") == [(b" age: ", ("grammar",), False)]


def test_a_text_that_must_end_is_offered_with_its_end() -> None:
    assert offers("one, two", b"one,") == [(b" two", ("grammar",), True)]
    assert offers("one, two", b"one, two") == [(b"", ("grammar",), True)]


def test_forced_bytes_stand_before_and_after_those_of_another_source() -> None:
    # The grammar refuses the other source's proposal from its start.
    assert offers(RECORD, b"", Fixed(b"Bo;")) == [(b"full name: Bo; age: ", ("grammar", "suffix"), False)]
    assert offers(RECORD, b"full name: ", Fixed(b"Bo;")) == [(b"Bo; age: ", ("suffix", "grammar"), False)]
    assert offers(RECORD, b"full name: Bo; age: ", Fixed(b"50;")) == [(b"50;", ("suffix", "grammar"), True)]


def test_what_the_grammar_refuses_is_cut() -> None:
    early = Fixed(b"Bo; wage", closes=True)
    assert offers(RECORD, b"full name: ", early) == [(b"Bo; age: ", ("suffix", "grammar"), False)]
    assert offers(RECORD, b"full name: Bo; age: 5", Fixed(b";", closes=True)) == [(b";", ("suffix",), True)]


class OwnTokens(Fixed):
    """Proposes the bytes as tokens of the target."""

    def propose(self, after: bytes = b"", limit: int = MAX_OFFERED_BYTES) -> Continuation | None:
        ids = tuple(MODEL.vocabulary.single_bytes(self._data).ids)
        chances = (0.9,) * len(ids)
        return Continuation(self.name, self._data, starts=tuple(range(len(ids))), confidences=chances, token_ids=ids)


def test_tokens_that_the_grammar_refuses_are_not_offered() -> None:
    assert offers(RECORD, b"full name: ", OwnTokens(b"Bob")) == [(b"Bob", ("suffix",), False)]
    assert offers(RECORD, b"full name: ", OwnTokens(b"Bo9")) == [(b"Bo", ("suffix",), False)]


def test_prompt_lookup_goes_on_after_forced_bytes() -> None:
    suffix = SuffixSource(Tape(MODEL.vocabulary, candidates(MODEL.vocabulary, b"full name: Bartholomew; age: 50;")))
    found = offers(RECORD, b"", suffix)
    assert found[0] == (b"full name: Bartholomew; age: 50;", ("grammar", "suffix"), True)


def test_the_chance_of_forced_bytes_is_learned_and_less_at_their_end() -> None:
    source = GrammarSource(form(RECORD))
    part = source.propose()
    assert part is not None
    first, last = part.evidence_of(0, 2), part.evidence_of(len(part.data) - 1, len(part.data))
    shared = TargetEstimates(((1, 10_000_000), (2, 11_000_000), (8, 15_000_000)))
    estimates = RequestEstimates(shared, [source])
    before = estimates.chances["grammar"].of(first)
    assert 0.8 < estimates.chances["grammar"].of(last) < before < 1.0
    planner = Planner(SpeculationParameters(), estimates)
    offer = Offer((5, 6, 7, 8), ("grammar",) * 4, (first,) * 4)
    assert planner.choose([offer], planner.plan([offer], None)) == (offer, 4)
    for _ in range(50):
        estimates.chances["grammar"].observe([(first, 0.0)])
    assert estimates.chances["grammar"].of(first) < 0.5 * before


def test_a_request_without_a_grammar_has_no_such_source() -> None:
    assert GrammarSource.open(Opening(Tape(MODEL.vocabulary, ()), lambda model: None)) is None  # type: ignore[arg-type, return-value]
