"""vLLM's engine in this process."""

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.rival_libraries.rival import LOOKUP_NGRAM, Answer, Clock, Request, Rival

# The first value that vLLM's guide proposes.
_TOKENS = 5


def preload_openmp() -> None:
    """Restarts this program with Intel's OpenMP preloaded, if it is installed, as vLLM's guide recommends."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = f"{library}:{os.environ.get('LD_PRELOAD', '')}"
        os.execv(sys.executable, sys.orig_argv)


def vllm(options: argparse.Namespace) -> tuple[str, Rival]:
    """Loads vLLM's engine in this process: plain, with prompt lookup, or with a draft model."""
    # In this process, on all cores (by default one is reserved for a server), with little memory and no telemetry.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    speculation = {
        "vllm-ngram": {"method": "ngram", "prompt_lookup_max": LOOKUP_NGRAM},
        "vllm-draft": {"method": "draft_model", "model": options.draft, "use_heterogeneous_vocab": True},
    }.get(options.name)
    model = LLM(
        options.model, dtype=options.dtype, max_model_len=options.context, max_num_seqs=1, disable_log_stats=False,
        # Otherwise a draft's layers form several groups next to a target with sliding windows, which vLLM refuses.
        disable_hybrid_kv_cache_manager=True if options.name == "vllm-draft" else None,
        speculative_config=speculation and {**speculation, "num_speculative_tokens": _TOKENS},
    )  # fmt: skip
    engine = model.llm_engine

    def drafted() -> int:
        named = (one for one in model.get_metrics() if one.name == "vllm:spec_decode_num_draft_tokens")
        return sum(int(one.value) for one in named)

    def answer(request: Request) -> Answer:
        before = drafted()
        clock, ids, passes = Clock(), list[int](), 0
        sampling = SamplingParams(
            temperature=0, max_tokens=request.max_tokens, ignore_eos=True, stop_token_ids=request.stop_ids,
            detokenize=False,
        )  # fmt: skip
        engine.add_request(str(clock.started), {"prompt_token_ids": request.prompt_ids}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                clock.tokens()
                passes += len(output.outputs[0].token_ids) > len(ids)
                ids = list(output.outputs[0].token_ids)
        elapsed_ns = clock.elapsed_ns
        accepted = len(ids) - passes if speculation else 0
        return Answer(ids, clock.first_token_ns, elapsed_ns, passes, drafted() - before, accepted)

    return f"vllm {version('vllm-cpu')}, torch {version('torch')}, {options.dtype}", answer
