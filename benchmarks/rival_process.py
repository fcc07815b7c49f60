"""Runs one library in this process and answers greedy requests from standard input, one at a time.

    PYTHON benchmarks/rival_process.py NAME --model DIR [--gguf FILE] [--draft DIR] [--draft-gguf FILE]
        [--dtype bfloat16] [--threads 2] [--context 2048]

PYTHON may belong to any environment: this file imports only the standard library and, at run time, what NAME needs. It
prints JSON lines: first {"about": TEXT}, or {"error": REASON} before it exits; then, for each input line
{"prompt_ids": [...], "max_tokens": N, "stop_ids": [...]}, the fields of `Answer` or {"error": REASON}.
"""

import argparse
import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

# The first values that each library's guide proposes.
LOOKUP_TOKENS = 10
LOOKUP_NGRAM = 3
VLLM_TOKENS = 5


@dataclass(frozen=True)
class Request:
    """Ids of the prompt, the maximum number of new tokens, and ids that end the answer."""

    prompt_ids: list[int]
    max_tokens: int
    stop_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """New ids, including one that ended them, and times since the request. A count is 0 if the library reports none."""

    token_ids: list[int]
    first_token_ns: int
    elapsed_ns: int
    pass_count: int = 0
    candidate_count: int = 0
    accepted_count: int = 0


@dataclass
class Clock:
    """Measures the time since its construction."""

    started: int = field(default_factory=time.perf_counter_ns)
    first_token_ns: int = 0

    def tokens(self) -> None:
        """Records that tokens have arrived."""
        self.first_token_ns = self.first_token_ns or self.elapsed_ns

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds since the start."""
        return time.perf_counter_ns() - self.started


Rival = Callable[[Request], Answer]


def main() -> None:
    """Loads the library's model and answers until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(RIVALS))
    parser.add_argument("--model", required=True, help="model directory for transformers, or what NAME loads instead")
    parser.add_argument("--gguf", help="the same model as a GGUF file for llama.cpp")
    parser.add_argument("--draft", help="directory of the draft")
    parser.add_argument("--draft-gguf", help="the draft as a GGUF file for llama.cpp")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--context", type=int, default=2048, help="maximum number of tokens of prompt and answer")
    options = parser.parse_args()
    if options.name.startswith("vllm"):
        _preload_openmp()
    _end_with_parent()
    # Libraries may print anything, so their standard output is redirected to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Must be set before the libraries that read it are imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    try:
        about, rival = RIVALS[options.name](options)
    except (Exception, SystemExit) as error:
        answers.write(json.dumps({"error": _reason(error)}) + "\n")
        sys.exit(1)
    answers.write(json.dumps({"about": about}) + "\n")
    _serve(rival, sys.stdin, lambda answer: answers.write(json.dumps(answer) + "\n"))


def _end_with_parent() -> None:
    """Asks Linux to kill this process with its parent: while stopped, it would not notice the end of its input."""
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
    """Loads transformers' `generate`: plain, with an assistant of another tokenizer, or with prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)

    def load(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()

    model = load(options.model)
    more: dict[str, Any] = {}
    if options.name == "transformers-assisted":
        if not options.draft:
            raise ValueError("transformers-assisted needs --draft")
        tokenizers = (AutoTokenizer.from_pretrained(path) for path in (options.model, options.draft))
        more = dict(zip(("tokenizer", "assistant_tokenizer"), tokenizers, strict=True))
        more["assistant_model"] = load(options.draft)
    elif options.name == "transformers-prompt-lookup":
        more = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    # A forward returns logits for its candidates and one more token.
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
    """A streamer for transformers, whose first `put` is the prompt."""

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
    """Loads llama.cpp's decode with argmax. A prompt's cached prefix is reused."""
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

    return _llamacpp_about(options), answer


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
        raise ValueError("this rival needs --gguf")
    return str(options.gguf)


def llama_server(options: argparse.Namespace) -> tuple[str, Rival]:
    """Starts llama.cpp's own server, plain or with a draft of the same tokenizer; see `_speculation_of_llama_cpp`.

    The program is `llama-server` on the PATH, or what LLAMA_SERVER names.
    """
    program = shutil.which(os.environ.get("LLAMA_SERVER", "llama-server"))
    if not program:
        raise ValueError("there is no llama-server on the PATH: build llama.cpp, or name it in LLAMA_SERVER")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(options.threads)
    server = subprocess.Popen(
        [
            program, "--model", _gguf(options), "--host", "127.0.0.1", "--port", str(port), "--parallel", "1",
            "--threads", threads, "--threads-batch", threads, "--ctx-size", str(options.context),
            *_speculation_of_llama_cpp(options),
        ],
        stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent,
    )  # fmt: skip

    def post(path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"llama-server answered {response.status}")
        yield from response
        connection.close()

    until = time.monotonic() + 300
    while True:
        try:
            list(post("/health", None))
            break
        except (OSError, RuntimeError) as error:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("llama-server did not start: see its messages above") from error
            time.sleep(0.2)

    def answer(request: Request) -> Answer:
        clock, ids, timings = Clock(), list[int](), dict[str, Any]()
        body = {
            "prompt": request.prompt_ids, "n_predict": request.max_tokens, "temperature": 0, "return_tokens": True,
            "stream": True, "cache_prompt": True,
        }  # fmt: skip
        for line in post("/completion", body):
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                timings = event.get("timings", timings)
                if not event["stop"]:
                    clock.tokens()
                    ids += event["tokens"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        return Answer(ids, clock.first_token_ns, clock.elapsed_ns, len(ids) - accepted, drafted, accepted)

    return f"{Path(program).name}, {Path(_gguf(options)).name}", answer


def _speculation_of_llama_cpp(options: argparse.Namespace) -> list[str]:
    """Returns llama-server's options for speculative decoding, with its own default number of candidates."""
    if options.name != "llama-server-draft":
        return []
    if not options.draft_gguf:
        raise ValueError("llama-server-draft needs --draft-gguf")
    return ["--spec-type", "draft-simple", "--spec-draft-model", options.draft_gguf]


def openvino_genai(options: argparse.Namespace) -> tuple[str, Rival]:
    """Loads `LLMPipeline`, plain or with prompt lookup, from an exported model or a GGUF file."""
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
    "llama-server": llama_server,
    "llama-server-draft": llama_server,
    "openvino-genai": openvino_genai,
    "openvino-genai-prompt-lookup": openvino_genai,
    "vllm": vllm,
    "vllm-ngram": vllm,
    "vllm-draft": vllm,
}


if __name__ == "__main__":
    main()
