"""Mends the sampler of vLLM for CPUs, whose version 0.32 verifies candidates with temperatures from unwritten memory.

There `expand_batch_to_tokens`, which gives each candidate the temperature, top-k and top-p of its request, writes to a
copy of its result (vLLM issue 55005). So with candidates of any kind, also vLLM's own, sampled texts have another
distribution than without. Greedy texts are not affected.
"""

import logging
from typing import Any

import torch


def mend_sampler(log: logging.Logger) -> None:
    """Replaces that function in this process if it is wrong. Never raises."""
    try:
        from vllm.v1.sample import rejection_sampler

        if not _is_right(rejection_sampler.expand_batch_to_tokens):
            rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
            log.warning(
                "this vLLM samples with wrong temperatures where it verifies candidates (vLLM issue 55005): "
                "DraftBridge's adapter has replaced its function expand_batch_to_tokens in this process"
            )
    except Exception:
        log.exception("DraftBridge's adapter could not check vLLM's sampler; texts with a temperature may be wrong")


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Returns each request's value once for each of its tokens, with one value replaced by another.

    `x`: (requests). `cu_num_tokens`: (requests), the number of tokens of a request and all before it. The result has
    `num_tokens` values, in the type of `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _is_right(expand: Any) -> bool:
    for values in (torch.tensor([0.3125, 0.0, 1.75]), torch.tensor([40, 0, 7], dtype=torch.int32)):
        found = expand(values, torch.tensor([2, 5, 6], dtype=torch.int32), 6, replace_from=0, replace_to=1)
        first, _, third = values.tolist()
        if found.tolist() != [first, first, 1, 1, 1, third]:
            return False
    return True
