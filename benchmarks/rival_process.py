"""Runs one library in this process and answers greedy requests from standard input, one at a time.

    PYTHON -m benchmarks.rival_process NAME --model DIR [--gguf FILE] [--draft DIR] [--draft-gguf FILE]
        [--dtype bfloat16] [--threads 2] [--context 2048]

PYTHON may belong to any environment: it imports only the standard library and, at run time, what NAME needs. It
prints JSON lines: first {"about": TEXT}, or {"error": REASON} before it exits; then, for each input line
{"prompt_ids": [...], "max_tokens": N, "stop_ids": [...]}, the fields of `Answer` or {"error": REASON}.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from benchmarks.rival_libraries.llama_cpp_python import llamacpp, llamacpp_prompt_lookup
from benchmarks.rival_libraries.llama_server import llama_server
from benchmarks.rival_libraries.openvino_pipeline import openvino_genai
from benchmarks.rival_libraries.rival import Load, Request, Rival, end_with_parent
from benchmarks.rival_libraries.transformers_generate import transformers
from benchmarks.rival_libraries.vllm_engine import preload_openmp, vllm

RIVALS: dict[str, Load] = {
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


def main() -> None:
    """Loads the library's model and answers until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(RIVALS))
    parser.add_argument("--model", required=True, help="model directory for transformers, or what NAME loads instead")
    parser.add_argument("--gguf", help="the same model as a GGUF file for llama.cpp")
    parser.add_argument("--draft", help="directory of the draft")
    parser.add_argument("--draft-gguf", help="the draft as a GGUF file for llama.cpp")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048, help="maximum number of tokens of prompt and answer")
    options = parser.parse_args()
    if options.name.startswith("vllm"):
        preload_openmp()
    end_with_parent()
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


def _serve(rival: Rival, lines: Iterable[str], say: Callable[[dict[str, Any]], object]) -> None:
    for line in lines:
        try:
            say(asdict(rival(Request(**json.loads(line)))))
        except Exception as error:
            say({"error": _reason(error)})


def _reason(error: BaseException) -> str:
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line[:300]}"


if __name__ == "__main__":
    main()
