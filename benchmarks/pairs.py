"""Measures the speed of a pair in every mode against the target alone through the same bridge, in one run.

    python -m benchmarks.pairs [--prompts FILE] [--count 24] [--tokens 128] [--temperature 0]
        [--target NAME] [--engine llamacpp] [--weights full] [--threads 2]
        [--draft NAME|none] [--draft-engine ...] [--draft-threads 1]
        [--modes off auto "auto, learning" lockstep opportunistic] [--rivals NAME[=PYTHON] ...] [--load NAME=PATH ...]
        [--json FILE] [--plot FILE.png]

Every prompt runs in all modes, one after the other, so that changes in the machine's speed affect all modes alike.
"auto, learning" is `auto` for a tenant, from whose earlier outputs the bridge learns. A request before these lets both
models read the prompt, so that it is cached for every mode. A category's ratio is that of the times of all tokens after
the first; the range is over prompts; tokens per second, time per token and time to the first token are medians over
prompts. FILE of prompts: see `benchmarks.prompts`; the default is its own 12. A model without a chat template continues
the last message of a chat as plain text.

Rivals are other software (`benchmarks.rival_process`): transformers, transformers-assisted (with the draft and both
tokenizers), transformers-prompt-lookup, llamacpp, llamacpp-prompt-lookup, llama-server, llama-server-draft (llama.cpp's
own program, with a draft of the same tokenizer), openvino-genai, openvino-genai-prompt-lookup, vllm, vllm-ngram,
vllm-draft (with the draft, across vocabularies). Each is a process in the environment of PYTHON, or
in this one, with the target's number of threads. It runs after the modes on every prompt and reads the same ids. A
rival that does not start, or fails later, is left out. Rivals get the first request too, but transformers does not
cache prompts. transformers and vLLM load the target's directory in the target's dtype; llama.cpp loads its GGUF file;
so does openvino-genai, unless `--load` names a directory that `optimum-cli export openvino` wrote. Weights of another
size have another speed and generate other texts.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import prompts
from benchmarks.report import ALONE, BRIDGED, LEARNING, Sample, plot, table
from benchmarks.rivals import Entry, Rival, RivalFailed, started
from draftbridge import Client, Generation
from draftbridge.v1 import model_pb2
from services.cli import bench
from services.cli.processes import fleet
from services.cli.terminal import DEFAULT_DRAFT, DEFAULT_TARGET
from services.engines.cpu import core_count
from services.store.resolve import has_gguf, resolve, resolve_gguf

MODES = (ALONE, *BRIDGED)


def main() -> None:
    """Runs the benchmark."""
    arguments = _arguments()
    modes = [ALONE, *[mode for mode in arguments.modes if mode != ALONE]]
    with (
        fleet(
            arguments.target,
            None if arguments.draft == "none" else arguments.draft,
            target_options=(
                "--engine",
                arguments.engine,
                "--weights",
                arguments.weights,
                "--threads",
                str(arguments.threads),
            ),
            draft_options=("--engine", arguments.draft_engine, "--threads", str(arguments.draft_threads)),
            bridge_options=("--ngram-memory", "1"),
        ) as running,
        Client(running.bridge) as client,
    ):
        model = next(model for model in client.models() if model.name == arguments.target)
        given = prompts.read(arguments.prompts, arguments.count)
        given = given if model.chat_template else [prompts.plain(one) for one in given]
        spoken = Spoken.of(arguments, model, given) if arguments.rivals else None
        options = spoken.options if spoken else []
        with started(arguments.rivals, options, dict(arguments.load), _report) as rivals:
            samples = _run(client, given, modes, rivals, spoken, arguments)
    names = list(dict.fromkeys(one.mode for one in samples))
    title = f"{arguments.target} ({arguments.engine}, weights {arguments.weights}, {arguments.threads} threads)"
    title += f" <- {arguments.draft}, T={arguments.temperature}, {arguments.tokens} tokens"
    Console(width=170).print(table(samples, names, title))
    if arguments.plot:
        plot(samples, names, title, arguments.plot)
    if arguments.json:
        about = {rival.name: rival.about for rival in rivals if rival.name in names}
        found = {"title": title, "rivals": about, "samples": [asdict(one) for one in samples]}
        arguments.json.write_text(json.dumps(found, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, help="maximum number of prompts, spread over the categories")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--draft", default=DEFAULT_DRAFT, help="none to use prompt lookup only")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=core_count())
    parser.add_argument("--draft-engine", default="torch")
    parser.add_argument("--draft-threads", type=int, default=1)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--rivals", nargs="+", default=[], type=Entry.parse, metavar="NAME[=PYTHON]")
    parser.add_argument("--load", nargs="+", default=[], type=_pair, metavar="NAME=PATH", help="what the rival loads")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG of the ratios")
    arguments = parser.parse_args()
    if arguments.rivals and arguments.temperature:
        parser.error("rivals are greedy: leave --temperature at 0")
    return arguments


def _pair(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    return Entry.parse(name).name, os.path.expanduser(path)


@dataclass(frozen=True)
class Spoken:
    """The prompts in the target's ids, and the options of all rivals."""

    prompt_ids: list[list[int]]
    stop_ids: list[int]
    options: list[str]

    @classmethod
    def of(cls, arguments: argparse.Namespace, model: model_pb2.Model, given: Sequence[dict[str, Any]]) -> "Spoken":
        """Encodes the prompts with transformers, from the tokenizer and template in the target's directory."""
        from transformers import AutoTokenizer

        directory = resolve(arguments.target)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        prompt_ids = []
        for one in given:
            if "messages" in one:
                text = tokenizer.apply_chat_template(one["messages"], tokenize=False, add_generation_prompt=True)
            else:
                text = one["prompt"]
            prompt_ids.append(list(tokenizer(text, add_special_tokens="prompt" in one)["input_ids"]))
        # A multiple of 256 tokens, as caches prefer, with room for candidates after the last token.
        context = -(-(max(map(len, prompt_ids)) + arguments.tokens + 32) // 256) * 256
        options = ["--model", str(directory), "--threads", str(arguments.threads), "--context", str(context)]
        options += ["--dtype", model.dtype if model.dtype in ("float32", "float16") else "bfloat16"]
        if has_gguf(arguments.target):
            options += ["--gguf", str(resolve_gguf(arguments.target))]
        if arguments.draft != "none":
            options += ["--draft", str(resolve(arguments.draft))]
            options += ["--draft-gguf", str(resolve_gguf(arguments.draft))] if has_gguf(arguments.draft) else []
        return cls(prompt_ids, list(model.special_ids.eos), options)


def _run(
    client: Client,
    given: Sequence[dict[str, Any]],
    modes: Sequence[str],
    rivals: Sequence[Rival],
    spoken: Spoken | None,
    arguments: argparse.Namespace,
) -> list[Sample]:
    """Runs every prompt in every mode, then by every rival; leaves out the samples of rivals that failed."""
    samples: list[Sample] = []
    left = list(rivals)
    for index, one in enumerate(given):
        _report(f"prompt {index + 1} of {len(given)}")
        turn = index % len(modes)
        results = _generated(client, one, [*modes[turn:], *modes[:turn]], arguments)
        alone = results[ALONE]
        samples += [_sample(one["category"], mode, result, alone) for mode, result in results.items()]
        if spoken is None:
            continue
        ids = spoken.prompt_ids[index]
        if len(ids) != alone.finished.usage.prompt_token_count:
            raise SystemExit("transformers encodes a prompt differently than the target: leave --rivals out")
        for rival in list(left):
            try:
                samples.append(_of_rival(one["category"], rival, ids, spoken.stop_ids, alone, arguments.tokens))
            except RivalFailed as failure:
                _report(f"{rival.name} is left out: {failure}")
                left.remove(rival)
                rival.close()
    failed = {rival.name for rival in rivals if rival not in left}
    return [one for one in samples if one.mode not in failed]


def _generated(
    client: Client, given: dict[str, Any], modes: Sequence[str], arguments: argparse.Namespace
) -> dict[str, Generation]:
    asked = prompts.options(given)
    bench.warm(client, drafted=arguments.draft != "none", **asked)
    options = {"max_tokens": arguments.tokens, "temperature": arguments.temperature, "seed": 1}
    own = {LEARNING: {"speculation": "auto", "tenant": "benchmark"}}
    return {mode: client.generate(**asked, **options, **own.get(mode, {"speculation": mode})) for mode in modes}


def _of_rival(
    category: str, rival: Rival, prompt_ids: Sequence[int], stop_ids: Sequence[int], alone: Generation, tokens: int
) -> Sample:
    rival.ask(prompt_ids, 2, stop_ids)
    answer = rival.ask(prompt_ids, tokens, stop_ids)

    def without_end(ids: Sequence[int]) -> list[int]:  # some rivals leave out the id that ended the text
        return [id_ for id_ in ids if id_ not in stop_ids]

    return Sample(
        category=category,
        mode=rival.name,
        token_count=len(answer.token_ids),
        elapsed_ns=answer.elapsed_ns,
        first_token_ns=answer.first_token_ns,
        pass_count=answer.pass_count,
        candidate_count=answer.candidate_count,
        accepted_count=answer.accepted_count,
        same_text=without_end(answer.token_ids) == without_end(alone.token_ids),
    )


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sample(category: str, mode: str, result: Generation, alone: Generation) -> Sample:
    did = result.finished.speculation
    return Sample(
        category=category,
        mode=mode,
        token_count=result.finished.usage.generated_token_count,
        elapsed_ns=did.elapsed_ns,
        first_token_ns=did.first_token_ns,
        pass_count=did.target_pass_count,
        candidate_count=did.num_draft_tokens,
        accepted_count=did.num_accepted_tokens,
        suffix_accepted_count=sum(one.num_accepted_tokens for one in did.sources if one.name == "suffix"),
        byte_count=did.generated_byte_count,
        near_ties=did.near_ties,
        same_text=result.token_ids == alone.token_ids,
        note=did.note,
        plan_summary=did.plan_summary,
    )


if __name__ == "__main__":
    main()
