"""Starts SGLang's server, as `python -m sglang.launch_server` does, with attention in PyTorch that verifies candidates.

SGLang's own attention in PyTorch cannot, and that for Intel's AMX is a kernel which has to be built from source. SGLang
starts its other processes with this file, too.
"""

import sys
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

_extended = TorchNativeAttnBackend.forward_extend


def _forward_extend(
    self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
) -> Any:
    if forward_batch.extend_prefix_lens is not None:
        return _extended(self, q, k, v, layer, forward_batch, save_kv_cache)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
    keys, values = (
        read(layer.layer_id) for read in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)
    )
    width = forward_batch.spec_info.draft_token_num
    queries = q.view(-1, width, layer.tp_q_head_num, layer.qk_head_dim)
    masks = forward_batch.spec_info.custom_mask[: len(queries) * width * width].view(-1, width, width).bool()
    found = torch.empty_like(queries)
    for row, (request, length) in enumerate(
        zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
    ):
        places = self.req_to_token_pool.req_to_token[request, : length + width]
        mask = torch.cat([torch.ones(width, length, dtype=torch.bool), masks[row]], dim=1)
        parts = (one.transpose(0, 1)[None] for one in (queries[row], keys[places], values[places]))
        grouped = layer.tp_q_head_num != layer.tp_k_head_num
        one = scaled_dot_product_attention(*parts, attn_mask=mask, scale=layer.scaling, enable_gqa=grouped)
        found[row] = one[0].transpose(0, 1)
    return found.view_as(q)


TorchNativeAttnBackend.forward_extend = _forward_extend

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
