"""Tiny models of several architectures and tokenizers, trained for seconds on the corpus of `tiny`."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from tests.support.tiny import CORPUS, tokenizer_json, vocabulary

_STEPS, _LEARNING_RATE, _IGNORED = 120, 4e-3, -100


def save_trained_model(directory: Path, kind: str, architecture: str, seed: int) -> Path:
    """Saves a model that continues the texts of the corpus, as a directory that can be served.

    `kind`: of its tokenizer; `architecture`: a model type of transformers.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(
        architecture,
        vocab_size=vocabulary(kind).size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    _train(model, Tokenizer.from_str(tokenizer_json(kind).decode()))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_bytes(tokenizer_json(kind))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    return directory


def _train(model: torch.nn.Module, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.encode(text).ids for text in CORPUS]
    longest = max(map(len, texts))
    ids = torch.tensor([one + [0] * (longest - len(one)) for one in texts])
    labels = torch.tensor([one + [_IGNORED] * (longest - len(one)) for one in texts])
    mask = (labels != _IGNORED).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    model.eval()
