"""Reads everything in a model directory but the weights: tokenizer, special ids, chat template, revision."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import UnusableModel
from bridge.text.models import Model, SpecialIds
from bridge.text.vocabulary import Vocabulary
from services.sandbox.jinja import run_template
from services.store.cache import fingerprint, reading, remedy_for, source_of
from services.store.tokenizer import read_tokenizer

# The largest share of a tokenizer's tokens, without added ones, that its model may lack.
_MAX_BEYOND = 0.01


@dataclass(frozen=True)
class ModelFiles:
    """Everything in a model directory but the weights. `revision` is a hash of its configuration and weights."""

    tokenizer_json: bytes
    vocabulary: Vocabulary
    special_ids: SpecialIds
    chat_template: str
    revision: str

    def check_size(self, vocabulary_size: int, directory: Path, stated_by: str = "") -> None:
        """Raises `UnusableModel` for a tokenizer of another model, with a larger vocabulary.

        Some models have a few tokens more than rows of their matrices, mostly added ones, which no text needs.
        `stated_by`: the file that the size is from, if it is not that of the weights.
        """
        words = self.vocabulary
        ids = range(vocabulary_size, words.size)
        beyond = sum(id_ not in words.missing and id_ not in words.added for id_ in ids)
        if beyond > _MAX_BEYOND * words.size:
            raise UnusableModel(
                f"{directory / 'tokenizer.json'} is of another model: {beyond} of its tokens have ids that are beyond "
                f"this model's vocabulary of {vocabulary_size}{' by its ' * bool(stated_by)}{stated_by}. Put the "
                "model's own tokenizer.json there",
                model=directory,
            )

    def describe(self, name: str, context_length: int, vocabulary_size: int) -> Model:
        """Returns the `Model` for bridges and sessions, with the limits of the engine that runs it."""
        return Model(
            name=name,
            context_length=context_length,
            vocabulary_size=vocabulary_size,
            vocabulary=self.vocabulary,
            special_ids=self.special_ids,
            chat_template=self.chat_template,
            # In this process, because the owner of the files trusts them. A bridge runs templates in a sandbox.
            run_template=run_template,
        )


def read_model_files(directory: Path) -> ModelFiles:
    """Reads a model directory. Raises `UnusableModel` or `TokenizerNotUnderstood`."""
    with reading(directory):
        tokenizer_json, vocabulary = read_tokenizer(directory / "tokenizer.json")
        settings = _json(directory / "tokenizer_config.json")
        return ModelFiles(
            tokenizer_json=tokenizer_json,
            vocabulary=vocabulary,
            special_ids=_special_ids(directory, vocabulary, settings),
            chat_template=_chat_template(directory, settings),
            revision=fingerprint(directory),
        )


def stated_vocabulary_size(directory: Path) -> int | None:
    """Returns the size of the vocabulary by a model's configuration, which is read long before the weights.

    None if it states none. That of a converted GGUF file may be made up, but its tokenizer is of the same file.
    """
    if source_of(directory):
        return None
    config = _json(directory / "config.json")
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        remedy = remedy_for(path.parent) or "save the model again with save_pretrained"
        raise UnusableModel(f"{path} is not JSON ({error}): {remedy}") from error
    return content if isinstance(content, dict) else {}


def _special_ids(directory: Path, vocabulary: Vocabulary, settings: dict[str, Any]) -> SpecialIds:
    """Returns the special ids of the tokenizer's settings; `eos` adds those of the generation and model settings."""

    def named(key: str) -> int | None:
        token = settings.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        return vocabulary.control_id(text) if isinstance(text, str) else None

    config, generation = _json(directory / "config.json"), _json(directory / "generation_config.json")
    ends = [named("eos_token")]
    for source in (generation, config):
        ids = source.get("eos_token_id")
        ends += ids if isinstance(ids, list) else [ids]
    eos = tuple(dict.fromkeys(id_ for id_ in ends if isinstance(id_, int) and 0 <= id_ < vocabulary.size))
    return SpecialIds(bos=named("bos_token"), eos=eos, pad=named("pad_token"))


def _chat_template(directory: Path, settings: dict[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except ValueError as error:
            raise UnusableModel(f"{file} is not UTF-8 ({error}): download it again, or remove it") from None
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        template = next((one["template"] for one in template if one.get("name") == "default"), "")
    return str(template)
