"""Stands in for SGLang's kernels for CPUs, which have to be built from source: those that its NGRAM algorithm needs.

Slow, and written from what SGLang's callers pass and expect. SGLang then computes models in PyTorch.
"""

from typing import Any

from torch import Tensor


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, places: Tensor, width: int
) -> None:
    """Writes the places of new tokens to the rows of their requests: those from `starts` to `ends`."""
    used = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[used : used + end - start].to(table.dtype)
        used += end - start


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, places: Tensor, width: int
) -> None:
    """Reads them."""
    used = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[used : used + end - start] = table[row, start:end]
        used += end - start


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follows each tree from its root as long as one of the children is what the model predicts."""
    chosen = target_predict.flatten()
    for tree in range(len(candidates)):
        node, count = 0, 0
        place = accept_index[tree, 0] = int(retrive_index[tree, 0])
        while count + 1 < accept_index.shape[1]:
            child = int(retrive_next_token[tree, node])
            while child >= 0 and candidates[tree, child] != chosen[place]:
                child = int(retrive_next_sibling[tree, child])
            if child < 0:
                break
            predicts[place] = chosen[place]
            node, count = child, count + 1
            place = accept_index[tree, count] = int(retrive_index[tree, child])
        predicts[place] = chosen[place]
        accept_token_num[tree] = count


def fill_bonus_tokens_cpu(accepted: Tensor, counts: Tensor, last: Tensor, stride: int) -> None:
    """Writes the last accepted token of each request."""
    for row, count in enumerate(counts.tolist()):
        last[row] = accepted.flatten()[row * stride + count - 1]


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, places: Tensor, accepted: Tensor) -> None:
    """Writes the places of all accepted tokens."""
    index = accept_index[accept_index >= 0]
    accepted[: len(index)] = places[index]


def copy_all_layer_kv_cache_cpu(layers: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Copies keys and values, of which `layers` has the addresses, from one place to another."""
    import ctypes

    for layer, stride in zip(layers.tolist(), strides.tolist(), strict=True):
        held = [ctypes.string_at(layer + stride * source, stride) for source in sources.tolist()]
        for target, data in zip(targets.tolist(), held, strict=True):
            ctypes.memmove(layer + stride * target, data, stride)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    # SGLang imports many kernels that this test never calls; one that is called has to be written first.
    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
