"""Writes tiny models as GGUF files."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel


def write(model: Any, path: Path) -> None:
    """Writes a Llama of transformers, so that llama.cpp can run the same model: weights in float32, no tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        data = tensor.to(torch.float32).numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = _interleaved(data, heads)
        place = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(place, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(data: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows: llama.cpp rotates neighbouring rows of a head, transformers rows half a head apart."""
    rows, columns = data.shape
    return data.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_qwen(path: Path) -> None:
    """Writes a tiny model of the Qwen2 family with a byte-level tokenizer of single characters."""
    writer = gguf.GGUFWriter(path, "qwen2")
    size, width = 260, 8
    alphabet = sorted(ByteLevel.alphabet())
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab"])
    writer.add_token_types([*[1] * len(alphabet), 3, 3, 3, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(alphabet) + 2)
    writer.add_pad_token_id(len(alphabet))
    shapes = {
        "token_embd.weight": (size, width),
        "output.weight": (size, width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (width, width),
        "blk.0.attn_q.bias": (width,),
        "blk.0.attn_k.weight": (width // 2, width),
        "blk.0.attn_k.bias": (width // 2,),
        "blk.0.attn_v.weight": (width // 2, width),
        "blk.0.attn_v.bias": (width // 2,),
        "blk.0.attn_output.weight": (width, width),
        "blk.0.ffn_gate.weight": (16, width),
        "blk.0.ffn_up.weight": (16, width),
        "blk.0.ffn_down.weight": (width, 16),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, np.full(shape, 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
