"""Reads `tokenizer.json`: how its tokens become bytes, and how its parts depend on their context.

The format is that of the tokenizers library: a normalizer, a pre-tokenizer, a model and a decoder, each a component or
a sequence of components. Nothing here depends on a model's name.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from tokenizers import AddedToken, Tokenizer
from typing_extensions import TypedDict

from bridge.errors import TokenizerNotUnderstood


class _Model(TypedDict, total=False):
    """What is read here of a file's model. Its tokens and merges, which are most of the file, are skipped."""

    type: str | None
    dropout: float | None
    unk_token: str | None
    unk_id: int | None
    continuing_subword_prefix: str | None


class _File(TypedDict):
    """A file. All keys but `model` are kept as they are."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    model: _Model


_FILE = TypeAdapter(_File)
Component = Mapping[str, Any]
Spec = Mapping[str, Any]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
# Real tokenizers stay far below these limits. A hostile one above them could fill the memory or slow down each request.
_MAX_ID = (1 << 22) - 1
_MAX_GROWTH_FACTOR = 64
_MAX_ADDED_LENGTHS = 256
_MAX_ADDED_CHARACTERS = 1024
# A draft proposes up to 64 tokens before the bridge translates any.
_MAX_TOKEN_BYTES = 4096
# The sum of the squares of their lengths: `StringMatcher.may_join` keeps every beginning and every end of each token.
_MAX_ADDED_SQUARES = 1 << 25
# The keys under which a sequence lists its components.
_SEQUENCE_KEYS = ("normalizers", "pretokenizers", "decoders")
# The supported decoders. Fuse joins tokens and Strip trims the whole text, so neither changes the middle of a text.
_DECODERS = {"ByteLevel", "ByteFallback", "Replace", "Metaspace", "WordPiece", "BPEDecoder", "Fuse", "Strip"}
# The decoders that turn a token's written form into text; a decoder after one of them works on text.
_TEXT_DECODERS = ("ByteLevel", "ByteFallback", "Fuse")
# Byte-level tokenizers write every byte as a printable character (GPT-2, `bytes_to_unicode`).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES_BY_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


def read(content: bytes) -> tuple[Spec, Tokenizer]:
    """Returns a file's JSON and the library's tokenizer for it. Raises `TokenizerNotUnderstood`."""
    try:
        library = Tokenizer.from_buffer(content)  # no other thread runs meanwhile: 1.3 s for 262,144 ids
        found = _FILE.validate_json(content)
    except Exception as error:  # the library raises a plain Exception for a file that it cannot read
        raise TokenizerNotUnderstood(
            f"the tokenizers library cannot read this as a tokenizer.json ({error}): "
            "save the model's fast tokenizer again with save_pretrained",
            component="file",
        ) from error
    # These settings are for training and classifiers: they truncate the text or make its ids random.
    spec: dict[str, Any] = {**found, "truncation": None, "padding": None}
    library.no_truncation()
    library.no_padding()
    if spec["model"].get("dropout"):
        library.model.dropout = None
    return spec, library


def check_limits(spec: Spec, library: Tokenizer, largest_id: int) -> None:
    """Raises `TokenizerNotUnderstood` for a tokenizer that would take too much memory or time."""
    # Each replacement can multiply the length of a text.
    steps = components(spec.get("normalizer"))
    growth = prod(max(len(step.get("content") or step.get("prepend") or ""), 1) for step in steps)
    # The library looks for added tokens in every text, and the bridge for each of their lengths.
    added = [len(token.content) for token in library.get_added_tokens_decoder().values()]
    lengths, squares = set(added), sum(length**2 for length in added)
    for component, value, limit, problem in (
        ("normalizer", growth, _MAX_GROWTH_FACTOR, "its normalizer can turn one character into {}"),
        ("added_tokens", len(lengths), _MAX_ADDED_LENGTHS, "it has added tokens of {} different lengths"),
        ("added_tokens", max(lengths, default=0), _MAX_ADDED_CHARACTERS, "it has an added token of {} characters"),
        ("added_tokens", squares, _MAX_ADDED_SQUARES, "the squared lengths of its added tokens sum to {}"),
        ("model", largest_id, _MAX_ID, "its largest id is {}"),
    ):
        _check_limit(component, value, limit, problem)


def check_token_bytes(tokens: Iterable[bytes]) -> None:
    """Raises `TokenizerNotUnderstood` for a token that is too long."""
    _check_limit("model", max(map(len, tokens), default=0), _MAX_TOKEN_BYTES, "it has a token of {} bytes")


def _check_limit(component: str, value: int, limit: int, problem: str) -> None:
    if value > limit:
        raise TokenizerNotUnderstood(
            f"the tokenizer exceeds a limit: {problem.format(value)}, and at most {limit} is allowed; "
            "serve the model with another tokenizer.json",
            component=component,
        )


def components(component: Component | None) -> Iterator[Component]:
    """Yields the parts of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for key in _SEQUENCE_KEYS:
            for part in component.get(key, ()):
                yield from components(part)
    else:
        yield component


def decoder_parts(spec: Spec) -> list[Component]:
    """Returns the parts of the decoder. Raises `TokenizerNotUnderstood` for one that does not work token by token."""
    parts = list(components(spec.get("decoder")))
    if not parts:  # some files omit the decoder, so it is derived from what encoding does
        undone = ("ByteLevel", "Metaspace")
        parts = [part for part in components(spec.get("pre_tokenizer")) if part["type"] in undone][:1]
        if not parts and spec["model"].get("type") == "WordPiece":
            parts = [{"type": "WordPiece", "prefix": spec["model"]["continuing_subword_prefix"]}]
    for part in parts:
        if part["type"] not in _DECODERS or (part["type"] == "Replace" and "String" not in part["pattern"]):
            raise TokenizerNotUnderstood(
                f"the tokenizer's decoder has a part {part['type']!r} that DraftBridge does not support: serve "
                "this model with a tokenizer.json that has a byte-level, SentencePiece-style or WordPiece decoder",
                component="decoder",
                type=part["type"],
            )
    return parts


def whole_text_step(decoder: Sequence[Component]) -> str:
    """Describes what a decoder does that depends on more than one token; empty if it only trims the text's ends."""
    types = [part["type"] for part in decoder]
    first_text = min((types.index(type_) for type_ in _TEXT_DECODERS if type_ in types), default=len(types))
    for index, part in enumerate(decoder):
        if part["type"] == "Replace" and index > first_text:
            return f"its decoder replaces {part['pattern']['String']!r} in the decoded text"
        if part["type"] == "Strip" and "Fuse" in types[index:]:
            return "its decoder trims every token"
    return ""


def decode_token(token: str, decoder: Sequence[Component]) -> bytes:
    """Returns the bytes that the decoder makes of a token's written form in the middle of a text."""
    for part in decoder:
        match part["type"]:
            case "ByteLevel":
                with suppress(KeyError):
                    return bytes(map(_BYTES_BY_CHARACTER.__getitem__, token))
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


def variant(spec: Spec, library: Tokenizer, *, middle: bool, plain: bool) -> Tokenizer:
    """Returns a variant of the tokenizer, with the same model, that adds no control tokens around a text.

    `middle`: it encodes the middle of a text, and so puts no dummy space in front. `plain`: written control tokens in a
    text are plain text.
    """
    frame = {**spec, "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [], "post_processor": None}
    if middle:
        frame |= {stage: _for_middle(spec.get(stage)) for stage in ("normalizer", "pre_tokenizer")}
    tokenizer = Tokenizer.from_str(json.dumps(frame))
    tokenizer.model = library.model
    added: dict[int, AddedToken] = library.get_added_tokens_decoder()
    for id_, token in added.items():
        written = library.id_to_token(id_) or token.content
        in_model = library.model.token_to_id(token.content) is not None
        if middle and written != token.content and not token.special and not in_model:
            # A normalizer puts the dummy space in front of this token, too, so it is found only after a space.
            token.content = decode_token(written, decoder_parts(spec)).decode()
    tokenizer.add_tokens(list(added.values()))
    if tokenizer.get_added_tokens_decoder() != added:
        raise TokenizerNotUnderstood(
            "the ids of the tokenizer's added tokens differ from those that the library assigns: save the model's "
            "fast tokenizer again with save_pretrained",
            component="added_tokens",
        )
    tokenizer.encode_special_tokens = plain
    return tokenizer


def prefixes_text(spec: Spec, stage: str) -> bool:
    """Returns whether a stage, `normalizer` or `pre_tokenizer`, treats a text's start differently from its middle."""
    return _for_middle(spec.get(stage)) != spec.get(stage)


def _for_middle(component: Component | None, *, after_split: bool = False) -> Component | None:
    """Returns a normalizer or pre-tokenizer without its treatment of a text's start.

    `after_split`: an earlier part splits the text, so this one treats every word like a text's start.
    """
    if component is None or component["type"] == "Prepend":
        return None
    if component["type"] == "Sequence":
        key = next(key for key in _SEQUENCE_KEYS if key in component)
        parts = (_for_middle(part, after_split=index > 0) for index, part in enumerate(component[key]))
        return {**component, key: [part for part in parts if part]}
    changed = dict(component)
    match component["type"]:
        case "Metaspace" if not after_split or component.get("prepend_scheme") == "first":
            changed |= {"prepend_scheme": "never"}
            changed.pop("add_prefix_space", None)
        case "ByteLevel" if not after_split:
            changed |= {"add_prefix_space": False}
        case "Strip" if component.get("strip_left"):
            changed |= {"strip_left": False}
    return changed


def splits_by_context(spec: Spec) -> bool:
    """Returns whether a pre-tokenizer looks at more than one character to decide where to split."""
    for part in components(spec.get("pre_tokenizer")):
        match part["type"]:
            case "Metaspace":
                continue
            case "ByteLevel" if not part.get("use_regex", True):
                continue
            case "Split" if len(part["pattern"].get("String", "")) == 1:
                continue
        return True
    return False


def changes_characters(spec: Spec) -> bool:
    """Returns whether a normalizer does more than add a prefix or replace spaces."""
    return any(
        part["type"] != "Prepend" and not (part["type"] == "Replace" and part["pattern"].get("String") == " ")
        for part in components(spec.get("normalizer"))
    )
