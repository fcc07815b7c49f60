"""Describes an engine's model and tokenizer to the bridge, from Hugging Face objects that the engine has anyway."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftbridge.v1 import model_pb2


def required(tokenizer: Any, engine: str) -> Any:
    """Returns the tokenizer of an engine. Raises `ValueError` if the engine was started without one."""
    if tokenizer is None:
        raise ValueError(
            f"DraftBridge needs {engine}'s tokenizer to translate candidates: leave out --skip-tokenizer-init"
        )
    return tokenizer


def special_ids(tokenizer: Any, ends: Iterable[Any]) -> model_pb2.SpecialIds:
    """Returns the special ids of a tokenizer. `ends`: further ids of the model that end a text, lists of them, None."""
    found = [tokenizer.eos_token_id]
    for ids in ends:
        found += ids if isinstance(ids, list | tuple | set) else [ids]
    return model_pb2.SpecialIds(
        bos=getattr(tokenizer, "bos_token_id", None),
        eos=list(dict.fromkeys(id_ for id_ in found if id_ is not None)),
        pad=getattr(tokenizer, "pad_token_id", None),
    )


def chat_template(tokenizer: Any) -> str:
    """Returns the tokenizer's default chat template, "" if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""


def tokenizer_json(name: str, revision: str | None, tokenizer: Any) -> bytes:
    """Returns the content of the model's `tokenizer.json`, or an equivalent of a tokenizer that has none.

    `name`: a local path, or a repository of which the file has been downloaded. Raises `ValueError`.
    """
    file: Any = Path(name) / "tokenizer.json"
    if not Path(name).exists():
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
    if isinstance(file, str | Path) and Path(file).is_file():
        return Path(file).read_bytes()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{name} has no tokenizer.json, which DraftBridge needs to translate candidates: give the engine another "
            "tokenizer"
        )
    return str(backend.to_str()).encode()


def log_like(name: str) -> logging.Logger:
    """Returns the logger of adapters and client, shown where the engine's logger `name` is unless it is configured."""
    log = logging.getLogger("draftbridge")
    if not log.handlers and (handlers := logging.getLogger(name).handlers):
        for handler in handlers:
            log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log
