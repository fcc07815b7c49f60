"""What a `tokenizer.json` says of how its tokens become bytes, and of how far its parts look around.

The format is that of the tokenizers library: a normalizer, a pre-tokenizer, a model and a decoder, each a
component or a sequence of them. Nothing here goes by a model's name.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from bridge.errors import TokenizerNotUnderstood

Component = Mapping[str, Any]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
# The largest vocabularies have a quarter of a million ids; a table of billions would fill the memory.
_MOST_IDS = 1 << 22
_MOST_GROWTH = 64
_MOST_LENGTHS = 256
_LONGEST_ADDED = 1024
# Where a sequence of components lists them.
_LIST_KEYS = ("normalizers", "pretokenizers", "decoders", "processors")
# Behind one of these a token is no longer what was written, but a text.
_SPELLING = ("ByteLevel", "ByteFallback", "Fuse")
# Fuse joins tokens and Strip trims the whole text's ends: neither changes the middle of a text.
_DECODERS = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "WordPiece", "BPEDecoder", "Fuse", "Strip"}


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with (GPT-2, `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in plain)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def read(tokenizer_json: bytes) -> tuple[dict[str, Any], Tokenizer]:
    """The file's content, and the library's tokenizer of it. Raises `TokenizerNotUnderstood`."""
    try:
        spec = json.loads(tokenizer_json)
        # What a training run or a classifier wants: never the same ids twice, or less than the whole text.
        spec |= {"truncation": None, "padding": None}
        if spec["model"].get("dropout"):
            spec["model"]["dropout"] = None
            tokenizer_json = json.dumps(spec).encode()
        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library raises plain Exception for a file that it cannot read
        raise TokenizerNotUnderstood(
            f"this is no tokenizer.json that the tokenizers library reads ({error}): "
            "save the model's fast tokenizer again with save_pretrained",
            component="file",
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_growth(spec)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= _MOST_IDS:
        raise TokenizerNotUnderstood(
            f"the tokenizer has an id {largest}, larger than any vocabulary's ({_MOST_IDS}): mend its tokenizer.json",
            component="model",
        )
    return spec, tokenizer


def _check_growth(spec: Mapping[str, Any]) -> None:
    """A character must not become a million: replacements multiply."""
    growth = 1
    for part in components(spec.get("normalizer")):
        growth *= max(len(part.get("content") or part.get("prepend") or ""), 1)
    if growth > _MOST_GROWTH:
        raise TokenizerNotUnderstood(
            f"the tokenizer's normalizer can make {growth} characters of one, more than any needs ({_MOST_GROWTH}): "
            "serve the model with another tokenizer.json",
            component="normalizer",
        )


def check_added(contents: Iterable[str]) -> None:
    """Added tokens are looked for in every text, so they must be such as can be found quickly."""
    lengths = {len(content) for content in contents}
    if len(lengths) > _MOST_LENGTHS or max(lengths, default=0) > _LONGEST_ADDED:
        raise TokenizerNotUnderstood(
            f"the tokenizer has added tokens of {len(lengths)} lengths, the longest {max(lengths)} characters; at most "
            f"{_MOST_LENGTHS} lengths up to {_LONGEST_ADDED} are taken: serve the model with another tokenizer.json",
            component="added_tokens",
        )


def components(component: Component | None) -> Iterator[Component]:
    """The parts of a normalizer, pre-tokenizer or decoder, sequences taken apart."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for key in _LIST_KEYS:
            for part in component.get(key, ()):
                yield from components(part)
    else:
        yield component


def decoder(spec: Mapping[str, Any]) -> list[Component]:
    """The parts of the decoder. Raises `TokenizerNotUnderstood` for one that is not a matter of single tokens."""
    parts = list(components(spec.get("decoder"))) or _implied_decoder(spec)
    for part in parts:
        if part["type"] not in _DECODERS or (part["type"] == "Replace" and "String" not in part["pattern"]):
            raise TokenizerNotUnderstood(
                f"the tokenizer's decoder has a part {part['type']!r} that DraftBridge cannot turn into bytes: "
                "serve this model from a tokenizer.json with a byte-level, SentencePiece-style or WordPiece decoder",
                component="decoder",
                type=part["type"],
            )
    return parts


def whole_text_step(parts: Sequence[Component]) -> str:
    """What a decoder does that is not a matter of each token by itself, in words; empty if nothing but trimming."""
    types = [part["type"] for part in parts]
    spelled = min((types.index(one) for one in _SPELLING if one in types), default=len(parts))
    for index, part in enumerate(parts):
        if part["type"] == "Replace" and index > spelled:
            return f"its decoder replaces {part['pattern']['String']!r} in the text that its tokens made"
        if part["type"] == "Strip" and "Fuse" in types[index:]:
            return "its decoder trims every token"
    return ""


def _implied_decoder(spec: Mapping[str, Any]) -> list[Component]:
    """Some files leave the decoder out; what was done on the way in tells what to undo."""
    for part in components(spec.get("pre_tokenizer")):
        if part["type"] in ("ByteLevel", "Metaspace"):
            return [part]
    if spec["model"].get("type") == "WordPiece":
        return [{"type": "WordPiece", "prefix": spec["model"]["continuing_subword_prefix"]}]
    return []


def spell(token: str, parts: Sequence[Component]) -> bytes:
    """The bytes of one token in the middle of a text, as the decoder has them."""
    for part in parts:
        match part["type"]:
            case "ByteLevel":
                if all(char in _ALPHABET for char in token):
                    return bytes(_ALPHABET[char] for char in token)
            case "ByteFallback":
                if match_ := BYTE_TOKEN.match(token):
                    return bytes([int(match_[1], 16)])
            case "Replace":
                token = token.replace(part["pattern"]["String"], part["content"])
            case "Metaspace":
                token = token.replace(part["replacement"], " ")
            case "WordPiece":
                prefix = part["prefix"]
                token = token[len(prefix) :] if token.startswith(prefix) else " " + token
            case "BPEDecoder":
                token = token.replace(part["suffix"], " ")
    return token.encode("utf-8", "surrogatepass")


def variant(spec: Mapping[str, Any], of: Tokenizer, *, middle: bool, plain: bool) -> Tokenizer:
    """The same tokenizer with its model shared.

    `middle`: for the middle of a text, where no dummy space is put in front. `plain`: takes control tokens that
    are written out in a text as text. Adds no control token around a text, ever.
    """
    frame = {
        "version": spec.get("version", "1.0"),
        "normalizer": _middle(spec.get("normalizer")) if middle else spec.get("normalizer"),
        "pre_tokenizer": _middle(spec.get("pre_tokenizer")) if middle else spec.get("pre_tokenizer"),
        "decoder": spec.get("decoder"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "added_tokens": [],
    }
    tokenizer = Tokenizer.from_str(json.dumps(frame))
    tokenizer.model = of.model
    wanted: dict[int, AddedToken] = {}
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    for id_, token in of.get_added_tokens_decoder().items():
        marks = {flag: getattr(token, flag) for flag in flags}
        written = of.id_to_token(id_) or token.content
        if middle and written != token.content and not token.special and of.model.token_to_id(token.content) is None:
            # A normalizer puts the dummy space in front of the token too: it is found behind a space only.
            marks["content"] = spell(written, decoder(spec)).decode()
        wanted[id_] = AddedToken(**marks)
    tokenizer.add_tokens(list(wanted.values()))
    if tokenizer.get_added_tokens_decoder() != wanted:
        raise TokenizerNotUnderstood(
            "the tokenizer's added tokens have ids that the library would not give them: save the model's fast "
            "tokenizer again with save_pretrained",
            component="added_tokens",
        )
    tokenizer.encode_special_tokens = plain
    return tokenizer


def has_dummy_prefix(spec: Mapping[str, Any]) -> bool:
    """Whether a text's beginning is taken otherwise than its middle."""
    return any(_middle(spec.get(part)) != spec.get(part) for part in ("normalizer", "pre_tokenizer"))


def _middle(component: Component | None, *, each_word: bool = False) -> Component | None:
    """A normalizer or pre-tokenizer without what it does to a text's beginning.

    `each_word`: it comes behind one that splits, so that what it puts in front it puts in front of every word.
    """
    if component is None or component["type"] == "Prepend":
        return None
    if component["type"] == "Sequence":
        key = next(key for key in _LIST_KEYS if key in component)
        parts = (_middle(one, each_word=index > 0) for index, one in enumerate(component[key]))
        return {**component, key: [part for part in parts if part]}
    changed = dict(component)
    match component["type"]:
        case "Metaspace" if not each_word or component.get("prepend_scheme") == "first":
            changed |= {"prepend_scheme": "never"}
            changed.pop("add_prefix_space", None)
        case "ByteLevel" if not each_word:
            changed |= {"add_prefix_space": False}
        case "Strip" if component.get("strip_left"):
            changed |= {"strip_left": False}
    return changed


def prefixes_words(spec: Mapping[str, Any]) -> bool:
    """Whether the space in front is put there by the pre-tokenizer, so also behind a token that a normalizer made."""
    return _middle(spec.get("pre_tokenizer")) != spec.get("pre_tokenizer")


def splits_by_context(spec: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer looks at more than one character to split there."""
    return any(not _is_local(part) for part in components(spec.get("pre_tokenizer")))


def _is_local(part: Component) -> bool:
    match part["type"]:
        case "Metaspace":
            return True
        case "ByteLevel":
            return not part.get("use_regex", True)
        case "Split":
            return len(part["pattern"].get("String", "..")) == 1
    return False


def changes_characters(spec: Mapping[str, Any]) -> bool:
    """Whether a normalizer does more than writing spaces in another way."""
    return any(
        part["type"] != "Prepend" and not (part["type"] == "Replace" and part["pattern"].get("String") == " ")
        for part in components(spec.get("normalizer"))
    )


def unknown_token(spec: Mapping[str, Any]) -> str | int | None:
    """The token, or its id, that stands for whatever the vocabulary cannot say."""
    model = spec["model"]
    unknown: str | int | None = model.get("unk_token")
    return model.get("unk_id") if unknown is None else unknown
