"""Refuses model directories whose loading could run code of theirs."""

import json
from pathlib import Path
from typing import Any

from bridge.errors import UnusableModel

REMEDY = "--trust-model, with --engine torch or habana, runs it; do so only if you trust the directory's author"


def refuse_code(directory: Path) -> None:
    """Raises `UnusableModel` for a directory whose weights are not safetensors.

    Pickled weights (`*.bin`, `*.pt`) are programs; beside safetensors they are ignored. Python files are refused when
    transformers asks to run them: models that it knows itself do not need theirs.
    """
    if (directory / "adapter_config.json").is_file():
        raise UnusableModel(
            f"{directory} is an adapter, which names another model to load: merge it into its model with "
            "merge_and_unload and save_pretrained",
            model=directory,
        )
    if not any(directory.glob("*.safetensors")):
        raise UnusableModel(
            f"{directory} has no weights in safetensors, and pickled weights can run code: save the model again with "
            f"save_pretrained. {REMEDY}",
            model=directory,
        )
    for index in directory.glob("*.safetensors.index.json"):
        files = _object(index).get("weight_map")
        for file in set(map(str, files.values())) if isinstance(files, dict) else ():
            if not file.endswith(".safetensors") or Path(file).name != file:
                raise UnusableModel(
                    f"{index} names weights that are not safetensors of this directory ({file[:100]!r}): save the "
                    "model again with save_pretrained",
                    model=directory,
                )


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):  # loading the model reports it
        return {}
    return content if isinstance(content, dict) else {}
