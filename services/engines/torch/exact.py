"""Copies the first layers of a model to float32, where rounding hides no error of the engine that runs them."""

import logging
from copy import deepcopy
from typing import Any

import torch

_log = logging.getLogger(__name__)

# With two layers, what the first one does wrong also reaches what attention keeps of earlier tokens.
_MIN_LAYERS = 2
# The memory of a copy, in bytes: enough for two layers of a model with 3 billion weights. Less than the keys and values
# take later.
_MAX_BYTES = 1 << 30
# Rows of the embeddings and of the output layer, which are the largest parts of small models.
_VOCABULARY_SIZE = 1024


@torch.inference_mode()
def first_layers(model: Any) -> Any | None:
    """Returns a copy of a transformers model in float32 on its device, with its own weights but few layers and tokens.

    It has a layer of each type that the model's configuration lists, and at least two. Leaves the model as it was.
    Returns None for a model that cannot be copied so, or whose copy takes more than `_MAX_BYTES`.
    """
    try:
        blocks = _blocks(model)
        kinds = list(getattr(model.config.get_text_config(), "layer_types", None) or ())
        count = min(max([_MIN_LAYERS, *(1 + kinds.index(kind) for kind in kinds)]), len(blocks))
        small = _few_tokens(model)
        left_out = {*small, *map(id, blocks[count:].parameters())}
        size = sum(4 * weights.numel() for weights in model.parameters() if id(weights) not in left_out)
        if size > _MAX_BYTES:
            raise ValueError(f"its first {count} layers take {size / 1e9:.0f} GB")
        rest = list(blocks[count:])
        del blocks[count:]
        try:
            copy = deepcopy(model, small).float()
        finally:
            blocks.extend(rest)
        _describe(copy, count, kinds)
        copy(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    except Exception as reason:  # models differ: those that are built in another way are tested in their own dtype only
        _log.info("the engine is not tested in float32 with this model's first layers: %s", reason)
        return None
    return copy


def _blocks(model: Any) -> torch.nn.ModuleList:
    """Returns the list of the model's layers. Raises ValueError if it has none."""
    count = model.config.get_text_config().num_hidden_layers
    for part in model.modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == count:
            return part
    raise ValueError("it has no list of layers")


def _few_tokens(model: Any) -> dict[int, Any]:
    """Returns what stands for the weights of embeddings and output layer in a copy, by the `id` of those weights."""
    embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
    size = min(embeddings.weight.shape[0], output.weight.shape[0])
    rows = torch.arange(0, size, -(-size // _VOCABULARY_SIZE), device=model.device)
    found = [embeddings.weight, output.weight, getattr(output, "bias", None)]
    return {id(one): torch.nn.Parameter(one[rows].float(), requires_grad=False) for one in found if one is not None}


def _describe(copy: Any, layer_count: int, kinds: list[str]) -> None:
    """Sets the numbers of layers and tokens in a copy's configuration."""
    config, embeddings = copy.config.get_text_config(), copy.get_input_embeddings()
    config.num_hidden_layers, config.vocab_size = layer_count, embeddings.weight.shape[0]
    if kinds:
        config.layer_types = kinds[:layer_count]
    embeddings.padding_idx = None  # it may be the id of a token that is left out
