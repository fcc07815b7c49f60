"""Measures structured output on 40 tasks over ten schemas: the target alone, and with what the grammar forces.

    python -m benchmarks.structured --target qwen2.5-coder-1.5b-instruct [--engine ik_llama] [--tasks 20]
    python -m benchmarks.structured --target MODEL --masks                 # the time of a mask, without the model
    python -m benchmarks.structured --target MODEL --llamacpp FILE.gguf    # llama.cpp with its own grammars
    python -m benchmarks.structured --target DIRECTORY --vllm PYTHON       # vLLM with its own structured output

The ways take turns on each task, in chats, at temperature 0, after one task that is not counted: `plain`, the target
alone without a grammar, up to as many tokens as with it; `alone`, with the grammar but no source; `grammar`, with
forced bytes as candidates; `auto`, with prompt lookup too. Times are those of the bridge, from the first token to the
last. vLLM's are those of requests whose prompt it has cached. Each text is parsed and validated. Speed is the sum of
all tokens by the sum of all times.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np

from benchmarks.vllm_server import vllm_server
from bridge.sampling.grammar import Grammar, GrammarKind
from draftbridge import Client
from services.cli.processes import fleet
from services.grammars.byte_matcher import byte_tokenizer
from services.grammars.compiler import compile_grammar
from services.grammars.token_matcher import TokenMatcher
from services.grammars.tokenizer import GrammarTokenizer

# More than the longest answer that the schemas allow.
MAX_TOKENS = 1000
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"speculation": "off"},
    "alone": {"speculation": "off"},
    "grammar": {"sources": ["grammar"]},
    "auto": {},
}
_INSTRUCTION = "Answer with one JSON object on one line that satisfies this JSON Schema:\n"


@dataclass(frozen=True)
class Task:
    """One prompt and the schema of its answer."""

    name: str
    schema: dict[str, Any]
    prompt: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """Returns the chat, which shows the schema to the model."""
        return [{"role": "user", "content": f"{self.prompt}\n\n{_INSTRUCTION}{json.dumps(self.schema)}"}]


@dataclass(frozen=True)
class Sample:
    """One answer. `passes` and the candidates are 0 for other software."""

    task: str
    way: str
    text: str
    tokens: int
    seconds: float
    passes: int = 0
    candidates: int = 0
    accepted: int = 0


def tasks(count: int | None = None) -> list[Task]:
    """Returns the tasks; with `count`, as many of each schema as of the others."""
    groups = json.loads(resources.files("benchmarks").joinpath("structured_tasks.json").read_text())
    found = [[Task(one["name"], one["schema"], prompt) for prompt in one["prompts"]] for one in groups]
    return [task for row in zip(*found, strict=True) for task in row][:count]


def check(task: Task, text: str) -> None:
    """Raises an error unless the text is JSON that satisfies the task's schema, with its formats."""
    value = json.loads(text)
    jsonschema.validate(value, task.schema, format_checker=jsonschema.FormatChecker())


def speeds(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns tokens per second by way, over all tasks."""
    tokens, seconds = defaultdict(int), defaultdict(float)
    for one in samples:
        tokens[one.way] += max(one.tokens - 1, 0)
        seconds[one.way] += one.seconds
    return {way: tokens[way] / seconds[way] for way in tokens if seconds[way]}


def measure(client: Client, chosen: Sequence[Task], ways: Sequence[str]) -> list[Sample]:
    """Runs all ways on each task. The plain way makes as many tokens as the others did."""
    samples = []
    for place, task in enumerate([chosen[-1], *chosen]):
        longest = 0
        for way in sorted(ways, key=lambda way: way == "plain"):
            if way == "plain":
                options = {"max_tokens": longest or MAX_TOKENS, "ignore_eos": True, **WAYS[way]}
            else:
                options = {"max_tokens": MAX_TOKENS, "json_schema": task.schema, **WAYS[way]}
            got = client.generate(messages=task.messages, **options)
            found = got.finished.speculation
            if way != "plain":
                check(task, got.text)
                longest = max(longest, len(got.token_ids))
            seconds = (found.elapsed_ns - found.first_token_ns) / 1e9
            if place:
                samples.append(
                    Sample(
                        task.name,
                        way,
                        got.text,
                        len(got.token_ids),
                        seconds,
                        found.target_pass_count,
                        found.num_draft_tokens,
                        found.num_accepted_tokens,
                    )
                )
        report(_progress(place, chosen, task, samples))
    return samples


def measure_llamacpp(path: str, chosen: Sequence[Task]) -> list[Sample]:
    """Runs llama.cpp through llama-cpp-python, plain and with the grammar that it makes of the schema."""
    from llama_cpp import Llama, LlamaGrammar

    cores = len(os.sched_getaffinity(0))  # its own default is half of them
    model = Llama(path, n_ctx=2048, n_threads=cores, n_threads_batch=cores, verbose=False)
    samples = []
    for place, task in enumerate([chosen[-1], *chosen]):
        limit = MAX_TOKENS
        for way in ("llama.cpp grammar", "llama.cpp plain"):
            plain = way.endswith("plain")
            grammar = None if plain else LlamaGrammar.from_json_schema(json.dumps(task.schema), verbose=False)
            text, count, first = "", 0, 0.0
            # A bias against the end of the text makes the plain answer as long as the other.
            bias = {model.token_eos(): -1e9} if plain else None
            for part in model.create_chat_completion(
                task.messages, temperature=0.0, max_tokens=limit, grammar=grammar, stream=True, logit_bias=bias
            ):
                if piece := part["choices"][0]["delta"].get("content"):
                    first, text, count = first or time.perf_counter(), text + piece, count + 1
            seconds = time.perf_counter() - first
            if not plain:
                limit = count
                try:  # its grammars leave out some keywords
                    check(task, text)
                except (ValueError, jsonschema.ValidationError) as error:
                    report(f"{task.name}: the text does not satisfy the schema: {str(error).splitlines()[0]}")
            if place:
                samples.append(Sample(task.name, way, text, count, seconds))
        report(_progress(place, chosen, task, samples))
    return samples


def measure_vllm(python: Path, model: str, chosen: Sequence[Task]) -> list[Sample]:
    """Runs vLLM of another Python environment, plain and with its own structured output.

    It computes in bfloat16 where the processor does, else in float32, as the torch engine does.
    """
    from services.engines.torch.packed import computes_bfloat16

    samples = []
    with TemporaryDirectory() as folder:
        dtype = "bfloat16" if computes_bfloat16() else "float32"
        options = ("--dtype", dtype, "--max-model-len", "2048")
        with vllm_server(python, model, Path(folder) / "vllm.log", *options) as server:
            for place, task in enumerate([chosen[-1], *chosen]):
                prompt = {"messages": task.messages}
                form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": task.schema, "strict": True}}
                server.complete(prompt, 1, response_format=form)
                answer = server.complete(prompt, MAX_TOKENS, response_format=form)
                check(task, answer.text)
                plain = server.complete(prompt, len(answer.ids), ignore_eos=True)
                if place:
                    for way, one in (("vLLM grammar", answer), ("vLLM plain", plain)):
                        samples.append(Sample(task.name, way, one.text, len(one.ids), one.seconds))
                report(_progress(place, chosen, task, samples))
    return samples


def time_masks(model: str, chosen: Sequence[Task], clock: Callable[[], int] = time.perf_counter_ns) -> list[float]:
    """Returns the milliseconds of each mask along an answer to each task, as a target's session computes it."""
    from services.store.tokenizer import read_vocabulary

    tokenizer = GrammarTokenizer(read_vocabulary(model, report))
    times = []
    for task in chosen:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(task.schema))
        matchers = compile_grammar(tokenizer.library, grammar), compile_grammar(byte_tokenizer(), grammar)
        matcher = TokenMatcher(*matchers, grammar, tokenizer, frozenset({0}), model)
        while True:
            started = clock()
            allowed = matcher.allowed()
            times.append((clock() - started) / 1e6)
            if allowed[0] or len(times) > 100_000:
                break
            matcher.advance([_pick(allowed, len(times))])
    report(f"{tokenizer.size} ids")
    return times


def _pick(allowed: np.ndarray, place: int) -> int:
    """Returns one of the allowed ids, a different one at each place."""
    found = np.flatnonzero(allowed)
    return int(found[(place * 7919) % len(found)])


def _progress(place: int, chosen: Sequence[Task], task: Task, samples: Sequence[Sample]) -> str:
    return f"{place}/{len(chosen)} {task.name}: {', '.join(f'{w} {s:.1f}' for w, s in speeds(samples).items())}"


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(samples: Sequence[Sample], reference: str) -> str:
    """Returns the results as a Markdown table, with speeds relative to a way."""
    rows = ["| way | tokens/s | ratio | tokens per pass | accepted |", "|---|---|---|---|---|"]
    found = speeds(samples)
    for way, speed in found.items():
        ones = [one for one in samples if one.way == way]
        passes, candidates = sum(one.passes for one in ones), sum(one.candidates for one in ones)
        per_pass = f"{sum(one.tokens for one in ones) / passes:.2f}" if passes else ""
        share = f"{sum(one.accepted for one in ones) / candidates:.0%}" if candidates else ""
        rows.append(f"| {way} | {speed:.1f} | {speed / found[reference]:.2f} | {per_pass} | {share} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--weights", help="precision of the weights, for engines that convert them")
    parser.add_argument("--tasks", type=int, help="how many of the 40 tasks")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--masks", action="store_true")
    parser.add_argument("--llamacpp", metavar="FILE")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chosen = tasks(arguments.tasks)
    if arguments.masks:
        times = time_masks(arguments.target, chosen)
        print(f"{len(times)} masks: median {median(times):.3f} ms, 99% {np.percentile(times, 99):.3f} ms")
        return
    if arguments.vllm:
        samples, reference = measure_vllm(arguments.vllm, arguments.target, chosen), "vLLM plain"
    elif arguments.llamacpp:
        samples, reference = measure_llamacpp(arguments.llamacpp, chosen), "llama.cpp plain"
    else:
        options = ["--engine", arguments.engine, *(["--weights", arguments.weights] if arguments.weights else [])]
        with fleet(arguments.target, None, target_options=options) as services, Client(services.bridge) as client:
            samples, reference = measure(client, chosen, arguments.ways), "alone"
    print(table(samples, reference))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in samples], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
