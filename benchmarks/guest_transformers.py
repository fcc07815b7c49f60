"""Compares transformers' `generate` with `draftbridge.assist` to transformers alone and to its own assisted generation.

    python -m benchmarks.guest_transformers --model DIR --draft DIR [--prompts FILE] [--count 6] [--max-tokens 40]
        [--dtype bfloat16] [--engine auto] [--ways plain assisted lookup bridge local] [--json FILE]

The same model in this process generates greedily in every way: alone, with the draft as `assistant_model` of another
tokenizer, with prompt lookup, with candidates of a bridge whose draft service runs `--draft` in an engine of ours, and
with prompt lookup of ours in this process ("local"). Bridge and draft are processes on the same cores. Every prompt
runs in every way, and the order rotates. Times exclude the first forward, which reads the prompt. Before, each way
generates for one more prompt. "same text" compares the ids with those of the model alone; in bfloat16 near ties part.
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks import prompts
from services.cli.processes import launched, serve

_OPTIONS = ("--until-stdin-closes", "--listen", "127.0.0.1:0")
_WAYS = ("plain", "assisted", "lookup", "bridge", "local")


class _Clock:
    """A streamer that notes when the first tokens came."""

    def __init__(self) -> None:
        self._calls, self.first, self.first_count = 0, 0.0, 0

    def put(self, ids: Any) -> None:
        self._calls += 1
        if self._calls == 2:  # the first call has the prompt
            self.first, self.first_count = perf_counter(), ids.numel()

    def end(self) -> None:
        pass


class _Laboratory:
    """The model, its assistant, and the bridge's address."""

    def __init__(self, options: argparse.Namespace, bridge: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch, self._options, self._bridge = torch, options, bridge
        # What an assistance without a bridge has put in place of the model's own methods.
        self._assistance: dict[str, Any] = {}
        if options.threads:
            torch.set_num_threads(options.threads)

        def load(path: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()

        self.model, self._draft = load(options.model), load(options.draft) if "assisted" in options.ways else None
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self._draft_tokenizer = AutoTokenizer.from_pretrained(options.draft)

    @contextlib.contextmanager
    def way(self, name: str) -> Iterator[Callable[[Any], dict[str, Any]]]:
        """Yields a function that generates for a prompt in this way."""
        import draftbridge

        more: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            if name == "assisted":
                more = {
                    "assistant_model": self._draft,
                    "tokenizer": self.tokenizer,
                    "assistant_tokenizer": self._draft_tokenizer,
                }
            elif name == "lookup":
                more = {"prompt_lookup_num_tokens": 10}
            elif name == "bridge":
                stack.enter_context(
                    draftbridge.assist(
                        self.model, self.tokenizer, self._bridge, deadline=self._options.deadline, engine="benchmark"
                    )
                )
            elif name == "local":
                stack.enter_context(self._local())
            yield lambda prompt: self._generate(prompt, more)

    @contextlib.contextmanager
    def _local(self) -> Iterator[None]:
        """Lets one assistance for all prompts, which remembers what forwards cost, take part for a while."""
        import draftbridge

        if not self._assistance:
            before = set(self.model.__dict__)
            draftbridge.assist(self.model, self.tokenizer, "local")
            self._assistance = {name: self.model.__dict__[name] for name in set(self.model.__dict__) - before}
        self.model.__dict__.update(self._assistance)
        yield
        for name in self._assistance:
            del self.model.__dict__[name]

    def _generate(self, prompt: Any, more: dict[str, Any]) -> dict[str, Any]:
        widths: list[int] = []
        hook = self.model.register_forward_hook(lambda module, args, output: widths.append(output.logits.shape[1]))
        clock = _Clock()
        messages = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
        if self.tokenizer.chat_template:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
        else:  # a model that does not chat continues the last message
            ids = self.tokenizer(messages[-1]["content"], return_tensors="pt")["input_ids"]
        try:
            with self._torch.inference_mode():
                found = self.model.generate(
                    ids, attention_mask=self._torch.ones_like(ids), do_sample=False, streamer=clock, pad_token_id=0,
                    max_new_tokens=self._options.max_tokens, **more,
                )[0, ids.shape[1] :].tolist()  # fmt: skip
            seconds = perf_counter() - clock.first
        finally:
            hook.remove()
        return {
            "ids": found,
            "speed": (len(found) - clock.first_count) / seconds,
            "tokens per forward": (len(found) - clock.first_count) / max(len(widths) - 1, 1),
        }


def main() -> None:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--served", help="what the draft service serves; by default DRAFT.gguf, or --draft without it")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--threads", type=int, help="of the model in this process")
    parser.add_argument("--draft-threads", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=0.25)
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--log-level", default="warning", help="of the bridge; info: a line for each prompt")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gguf = Path(f"{options.draft}.gguf")
    served = options.served or str(gguf if gguf.exists() else options.draft)
    found = prompts.read(options.prompts, options.count + 1)
    results: list[dict[str, Any]] = []
    common = ("--role", "draft", "--engine", options.engine, "--threads", str(options.draft_threads))
    with (
        serve(served, *common) as (draft, _),
        launched("bridge", "bridge", "--draft", draft, *_OPTIONS, "--log-level", options.log_level) as (bridge, _),
    ):
        laboratory = _Laboratory(options, bridge)
        for number, prompt in enumerate(found):
            turn = number % len(options.ways)
            answers = {}
            for name in (*options.ways[turn:], *options.ways[:turn]):
                with laboratory.way(name) as generate:
                    answers[name] = generate(prompt)
            if number:
                results.append({"category": prompt["category"]} | answers)
                print(prompt["category"], {name: round(one["speed"], 2) for name, one in answers.items()}, flush=True)
    print(
        f"\nspeed relative to the model alone, {len(results)} prompts of {options.max_tokens} tokens, {options.dtype}"
    )
    print("| way | median | least | most | tokens per forward | same text |\n|---|---|---|---|---|---|")
    for name in options.ways:
        ratios = [one[name]["speed"] / one["plain"]["speed"] for one in results]
        same = sum(one[name]["ids"] == one["plain"]["ids"] for one in results)
        forwards = median(one[name]["tokens per forward"] for one in results)
        print(
            f"| {name} | {median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} | {forwards:.2f} "
            f"| {same} of {len(results)} |"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
