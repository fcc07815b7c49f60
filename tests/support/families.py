"""Tokenizers of every family in use, trained on the corpus of `tiny`, and the real ones of `real`."""

import functools
import io
import json
from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bridge.text.vocabulary import Vocabulary
from tests.support import real, tiny
from tests.support.tiny import CORPUS, SPECIALS

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", LLAMA_3)


def _byte_level(*patterns: str, normalizer: normalizers.Normalizer | None = None, size: int = 400) -> Tokenizer:
    """Like the GPT family: bytes written as characters, after a split by patterns."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=bool(patterns)))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _roberta() -> Tokenizer:
    """Puts a space in front of every text, and has a control token that removes white space before it."""
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return tokenizer


def _added_tokens() -> Tokenizer:
    """Has added tokens that are not special, one of which begins with a space."""
    tokenizer = _byte_level(LLAMA_3)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.add_tokens([AddedToken(" fox jumps"), AddedToken("é🎉", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


def _llama_2_added() -> Tokenizer:
    """Puts a space in front by a normalizer, and has added tokens, some of which match only normalized text."""
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json("sentencepiece").decode())
    tokenizer.add_tokens([AddedToken("<think>", normalized=True), AddedToken("</think>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|im end|>", normalized=True), AddedToken("[INST]", normalized=False)])
    return tokenizer


def _t5_words() -> Tokenizer:
    """Like T5's own file: splits into words, then puts a space in front of each."""
    tokenizer = _t5()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    return tokenizer


def _byte_level_words() -> Tokenizer:
    """Puts a space in front of every word, even if there was none."""
    tokenizer = _byte_level(LLAMA_3)
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
    )
    return tokenizer


def _gemma() -> Tokenizer:
    """Writes spaces as ▁, puts none in front, does not split into words, and falls back to bytes."""
    spec = json.loads(tiny.tokenizer_json("sentencepiece"))
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spec["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    spec["decoder"]["decoders"].pop()
    return Tokenizer.from_str(json.dumps(spec))


def _llama_2_new() -> Tokenizer:
    """Like newer Llama-2 files: Metaspace, with a space in front of the whole text only."""
    spec = json.loads(tiny.tokenizer_json("sentencepiece"))
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return Tokenizer.from_str(json.dumps(spec))


def _sentencepiece(kind: str, **options: object) -> tuple[list[tuple[str, float]], bytes]:
    """Trains a SentencePiece model and returns its pieces and normalization table."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb2

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=content,
        model_type=kind,
        control_symbols=["<turn>"],
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=4,
        pad_piece="<pad>",
        bos_piece="<bos>",
        eos_piece="<eos>",
        minloglevel=2,
        **options,
    )
    model = pb2.ModelProto.FromString(content.getvalue())
    return [(piece.piece, piece.score) for piece in model.pieces], model.normalizer_spec.precompiled_charsmap


def _scored(pieces: list[tuple[str, float]], unknown: int = 4) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, False))
    tokenizer.add_special_tokens([AddedToken(name) for name in [*SPECIALS, "<unk>"]])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _t5() -> Tokenizer:
    """Scored pieces after SentencePiece's normalization, an unknown token, and an end of text after each text."""
    pieces, charsmap = _sentencepiece("unigram", vocab_size=250)
    tokenizer = _scored(pieces)
    steps = [normalizers.Precompiled(charsmap), normalizers.Strip(left=False, right=True)]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), "▁")])
    tokenizer.post_processor = processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 2)])
    return tokenizer


def _xlnet() -> Tokenizer:
    """Lower-cases, removes accents, unifies quotation marks; adds control tokens only after a text."""
    pieces, charsmap = _sentencepiece("unigram", vocab_size=200, normalization_rule_name="nmt_nfkc_cf")
    tokenizer = _scored(pieces)
    quotes = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    case = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    tail = [normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*quotes, *case, *tail])
    tokenizer.post_processor = processors.TemplateProcessing(
        "$A <eos> <turn>", special_tokens=[("<eos>", 2), ("<turn>", 3)]
    )
    return tokenizer


def _characters() -> Tokenizer:
    """Has a token for each character of the corpus, and one for all others."""
    pieces, _ = _sentencepiece("char", vocab_size=250, normalization_rule_name="identity")
    return _scored(pieces)


def _wordpiece_uncased() -> Tokenizer:
    return Tokenizer.from_str(tiny.tokenizer_json("wordpiece").decode())


def _wordpiece_cased() -> Tokenizer:
    tokenizer = _wordpiece_uncased()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": _byte_level,
    "llama-3": lambda: _byte_level(LLAMA_3),
    "qwen": lambda: _byte_level(QWEN, normalizer=normalizers.NFC()),
    "deepseek": lambda: _byte_level(*DEEPSEEK),
    "o200k": lambda: _byte_level(O200K),
    "roberta": _roberta,
    "lower-case": lambda: _byte_level(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "bytes": lambda: _byte_level(size=256 + len(SPECIALS)),
    "added-tokens": _added_tokens,
    "llama-2": lambda: Tokenizer.from_str(tiny.tokenizer_json("sentencepiece").decode()),
    "llama-2-new": _llama_2_new,
    "llama-2-added": _llama_2_added,
    "t5-words": _t5_words,
    "byte-level-words": _byte_level_words,
    "gemma": _gemma,
    "unigram": lambda: Tokenizer.from_str(tiny.tokenizer_json("unigram").decode()),
    "t5": _t5,
    "xlnet": _xlnet,
    "characters": _characters,
    "bert": _wordpiece_uncased,
    "bert-cased": _wordpiece_cased,
}
# Tokenizers that reproduce any Unicode text. The others have a normalizer, or lack tokens for some characters; SmolLM2
# lacks tokens for some bytes.
EXACT = [*("gpt-2", "llama-3", "deepseek", "o200k", "roberta", "bytes", "added-tokens"), "gemma", "unigram"]
EXACT += [
    "llama-2",
    "llama-2-new",
    "llama-2-added",
    *(f"real {name}" for name in real.NAMES if name not in ("qwen", "smollm2")),
]
# Tokenizers that cannot distinguish ▁ from a space.
SPACED = (
    "llama-2",
    "llama-2-new",
    "llama-2-added",
    "gemma",
    "unigram",
    "real gemma-3",
    "real mistral-v1",
    "real mistral-v3",
)
NAMES = [*FAMILIES, *(f"real {name}" for name in real.NAMES)]


@functools.cache
def tokenizer_json(name: str) -> bytes:
    """Returns the content of the `tokenizer.json`."""
    if name.startswith("real "):
        return real.tokenizer_json(name.removeprefix("real "))
    return FAMILIES[name]().to_str().encode()


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    """Returns the `Vocabulary` of the tokenizer."""
    return Vocabulary(tokenizer_json(name))


@functools.cache
def library(name: str) -> Tokenizer:
    """Returns the tokenizers library's own tokenizer, as the oracle."""
    return Tokenizer.from_str(tokenizer_json(name).decode())
