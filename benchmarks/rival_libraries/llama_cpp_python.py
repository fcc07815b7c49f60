"""llama.cpp in this process, through llama-cpp-python."""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.rival_libraries.rival import LOOKUP_TOKENS, Answer, Clock, Request, Rival, gguf_of


def llamacpp(options: argparse.Namespace) -> tuple[str, Rival]:
    """Loads llama.cpp's decode with argmax. A prompt's cached prefix is reused."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    loading = llama_cpp.llama_model_default_params()
    loading.n_gpu_layers = 0
    weights = llama_cpp.llama_model_load_from_file(gguf_of(options).encode(), loading)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = options.context
    settings.n_threads = settings.n_threads_batch = options.threads
    context = llama_cpp.llama_init_from_model(weights, settings)
    memory = llama_cpp.llama_get_memory(context)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))
    cached: list[int] = []

    def step(ids: list[int]) -> int:
        cached.extend(ids)
        data = (llama_cpp.llama_token * len(ids))(*ids)  # the batch points into it
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(data, len(ids))):
            raise RuntimeError("llama_decode failed")
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (size,)).argmax())

    def answer(request: Request) -> Answer:
        clock, prompt = Clock(), request.prompt_ids
        # The last token always runs, because its logits are needed.
        pairs = enumerate(zip(cached, prompt[:-1], strict=False))
        kept = next((index for index, (old, new) in pairs if old != new), min(len(cached), len(prompt) - 1))
        if not llama_cpp.llama_memory_seq_rm(memory, 0, kept, -1):  # a sliding window no longer holds what it needs
            llama_cpp.llama_memory_clear(memory, True)
            kept = 0
        del cached[kept:]
        ids = [step(prompt[kept:])]
        clock.tokens()
        while len(ids) < request.max_tokens and ids[-1] not in request.stop_ids:
            ids.append(step(ids[-1:]))
        return Answer(ids, clock.first_token_ns, clock.elapsed_ns, len(ids))

    return _about(options), answer


def llamacpp_prompt_lookup(options: argparse.Namespace) -> tuple[str, Rival]:
    """Loads llama-cpp-python's loop with its prompt lookup."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    # Candidates of each pass.
    widths: list[int] = []

    def draft(ids: Any, /, **more: Any) -> Any:
        found = lookup(ids, **more)
        widths.append(len(found))
        return found

    model = Llama(
        gguf_of(options), n_ctx=options.context, n_batch=options.context, n_threads=options.threads,
        n_threads_batch=options.threads, n_gpu_layers=0, draft_model=draft, logits_all=True, verbose=False,
    )  # fmt: skip

    def answer(request: Request) -> Answer:
        widths.clear()
        clock, ids = Clock(), list[int]()
        for token in model.generate(request.prompt_ids, temp=0.0, repeat_penalty=1.0):
            clock.tokens()
            ids.append(token)
            if len(ids) == request.max_tokens or token in request.stop_ids:
                break
        passes = 1 + len(widths)
        return Answer(ids, clock.first_token_ns, clock.elapsed_ns, passes, sum(widths), len(ids) - passes)

    return _about(options), answer


def _about(options: argparse.Namespace) -> str:
    return f"llama.cpp of llama-cpp-python {version('llama-cpp-python')}, {Path(gguf_of(options)).name}"
