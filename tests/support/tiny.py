"""Tiny tokenizers of every kind, and an engine with random logits that needs no weights."""

import collections
import functools
import json
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bridge.sampling.sampler import History, Logits, Sampler, SamplingParameters
from bridge.text.models import Model, SpecialIds
from bridge.text.vocabulary import Vocabulary
from services.engines.engine import Row
from services.engines.scheduler import Scheduler
from services.model.host import LoadedModel
from services.sandbox.jinja import run_template
from services.store.files import ModelFiles

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind; it's asleep.",
    "She sells sea shells, 1234 of them, for $56.78 by the sea shore!\n\nReally?",
    "Grüße aus Köln: naïve café, señor, Ελλάδα, Привет мир, 東京へようこそ, 안녕하세요, 🎉🎉 👩‍👩‍👧",
    "def f(x):\n    return x + 1\n\n\tif a  and   b:\r\n        pass",
    "0, 0, 0, 0, |---|---|---| aaaa bbbb the the the and and over and over again",
    'He said "hello, world" (again), and she said: "good-bye"... the end.',
]
SPECIALS = ["<pad>", "<bos>", "<eos>", "<turn>"]
KINDS = ("byte_level", "sentencepiece", "unigram", "wordpiece")
# Kinds that can spell any bytes; WordPiece has no token for white space and lower-cases.
EXACT_KINDS = ("byte_level", "sentencepiece", "unigram")


@functools.cache
def tokenizer_json(kind: str) -> bytes:
    """Returns the content of the `tokenizer.json` of a small tokenizer of the given kind."""
    spec = {
        "byte_level": _byte_level,
        "sentencepiece": _sentencepiece,
        "unigram": _unigram,
        "wordpiece": _wordpiece,
    }[kind]()
    return json.dumps(spec).encode()


def _trained(tokenizer: Tokenizer, trainer: object) -> dict:
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())


def _byte_level() -> dict:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    return _trained(tokenizer, trainer)


def _sentencepiece() -> dict:
    """Like Llama-2: a dummy space in front, no split into words, bytes for unknown characters."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    specials = [*SPECIALS, "<unk>"]
    # The trainer would break ties between rare characters differently in each process, and texts would vary with it.
    counts = collections.Counter("".join(CORPUS).replace(" ", "▁"))
    alphabet = sorted(counts, key=lambda character: (-counts[character], character))[:60]
    trainer = trainers.BpeTrainer(
        vocab_size=200, show_progress=False, special_tokens=specials, initial_alphabet=alphabet, limit_alphabet=60
    )
    spec = _trained(tokenizer, trainer)
    spec["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    spec["pre_tokenizer"] = None
    spec["post_processor"] = json.loads(
        processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)]).__getstate__()
    )
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    spec["model"]["byte_fallback"] = True
    spec["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return spec


def _unigram() -> dict:
    """Like T5: a dummy space in front, scored pieces, an end of text after every text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    specials = [*SPECIALS, "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=250, show_progress=False, special_tokens=specials, unk_token="<unk>")
    spec = _trained(tokenizer, trainer)
    spec["post_processor"] = json.loads(
        processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)]).__getstate__()
    )
    spec["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    spec["model"]["byte_fallback"] = True
    spec["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, spec["decoder"]]}
    return spec


def _wordpiece() -> dict:
    """Like BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _trained(
        tokenizer, trainers.WordPieceTrainer(vocab_size=300, show_progress=False, special_tokens=[*SPECIALS, "<unk>"])
    )


@functools.cache
def vocabulary(kind: str) -> Vocabulary:
    """Returns the `Vocabulary` of that kind of tokenizer."""
    return Vocabulary(tokenizer_json(kind))


def own_ids(kind: str, text: str, *, framed: bool) -> list[int]:
    """Returns the library's ids for a text, without an end of text after it, which would end a prompt."""
    ids: list[int] = Tokenizer.from_str(tokenizer_json(kind).decode()).encode(text, add_special_tokens=framed).ids
    return ids[:-1] if framed and ids and ids[-1] == 2 else ids


def model(kind: str, context_length: int = 512, padding: int = 5, **options: object) -> Model:
    """Returns a model with that tokenizer, whose last `padding` columns of logits have no token."""
    words = vocabulary(kind)
    return Model(
        name=f"tiny-{kind}",
        context_length=context_length,
        vocabulary_size=words.size + padding,
        vocabulary=words,
        special_ids=SpecialIds(bos=1, eos=(2,), pad=0),
        run_template=run_template,
        **options,  # type: ignore[arg-type]
    )


class HashEngine:
    """A random model, whose logits at a position depend only on the last three ids.

    Keeps a cache of ids for each slot, so that a wrong `keep` changes the text.
    """

    name, device, dtype, logit_tolerance = "hash", "cpu", "float32", 0.0

    def __init__(self, of: Model, seed: int = 0, slot_count: int = 4, sharpness: float = 3.0) -> None:
        self.context_length = of.context_length
        self.vocabulary_size = of.vocabulary_size
        self.slot_count = slot_count
        self.cache_byte_count = 4 * slot_count * of.context_length
        self._seed = seed
        self._sharpness = sharpness
        self._cache: list[list[int]] = [[] for _ in range(slot_count)]
        self._memo: dict[tuple[int, ...], Logits] = {}

    def logits(self, ids: Sequence[int]) -> Logits:
        """Returns the logits after `ids`."""
        last = tuple(ids[-3:])
        if last not in self._memo:
            generator = np.random.default_rng([self._seed, *last])
            scores = generator.standard_normal(self.vocabulary_size, dtype=np.float32) * self._sharpness
            scores[2] -= 2.0  # makes an end of text less likely
            self._memo[last] = scores
        return self._memo[last]

    def forward(self, rows: Sequence[Row]) -> list[Logits]:
        """See `Engine.forward`."""
        results = []
        for row in rows:
            cache = self._cache[row.slot]
            assert row.keep <= len(cache), "a row keeps more than its slot holds"
            assert row.keep + len(row.token_ids) <= self.context_length
            del cache[row.keep :]
            out = []
            for index, id_ in enumerate(row.token_ids):
                cache.append(id_)
                if index >= row.logits_from:
                    out.append(self.logits(cache))
            results.append(np.array(out, np.float32).reshape(len(out), self.vocabulary_size))
        return results

    def copy(self, source: int, target: int, token_count: int) -> None:
        """See `Engine.copy`."""
        assert token_count <= len(self._cache[source]), "a copy of more than its source holds"
        self._cache[target] = self._cache[source][:token_count]


def scheduler(engine: HashEngine, queue_limit: int = 64) -> Scheduler:
    """Returns a scheduler that runs the engine."""
    return Scheduler(lambda: engine, queue_limit)


def loaded(kind: str, seed: int = 0, **options: object) -> LoadedModel:
    """Returns a model that can be served."""
    of = model(kind, **options)  # type: ignore[arg-type]
    engine = HashEngine(of, seed)
    files = ModelFiles(tokenizer_json(kind), of.vocabulary, of.special_ids, of.chat_template, "0")
    return LoadedModel(files, engine, of, scheduler(engine))


def sampler(of: Model, temperature: float = 0.0, seed: int = 0, **options: object) -> Sampler:
    """Returns a sampler for the model."""
    from bridge.sampling.noise import token_keys

    missing = np.array(sorted(of.vocabulary.missing), int)
    keys = token_keys(of.vocabulary, of.special_ids.eos)
    parameters = SamplingParameters(temperature=temperature, **options)  # type: ignore[arg-type]
    return Sampler(parameters, seed, keys, missing, parameters.ends(of.special_ids.eos), confident=True)


def decode_alone(of: Model, engine: HashEngine, choose: Sampler, prompt: Sequence[int], count: int) -> list[int]:
    """Returns the generated ids by plain decoding without cache and candidates, as the slow oracle."""
    ids, offset, empty, history = list(prompt), 0, 0, History(prompt)
    while len(ids) - len(prompt) < count and len(ids) < of.context_length:
        id_ = choose.choose(engine.logits(ids), offset, empty, history).token_id
        ids.append(id_)
        history.extend((id_,))
        data = of.vocabulary.token_bytes(id_)
        offset, empty = offset + len(data), 0 if data else empty + 1
        if id_ in choose.ends:
            break
    return ids[len(prompt) :]
