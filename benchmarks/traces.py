"""Where a draft is right: of each of its tokens of what a target says, whether it would have said it too.

    python -m benchmarks.traces --json FILE [--target NAME] [--draft NAME] [--prompts FILE] [--count 24] [--tokens 128]

Greedy. What the target says is written in the draft's tokens, and the draft reads it all at once. The texts follow one
another in one string of ones and zeros, for `benchmarks.simulate --trace FILE`. FILE of prompts: as in
`benchmarks.prompts`; without it, the prompts of the tests.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks import prompts
from bridge.generation import Delta, Request, generate, render
from bridge.policy import Mode, SpeculationParameters
from bridge.sampling import SamplingParameters
from bridge.templates import Chat
from bridge.translation import DraftContext, common_prefix_length
from services.cli import DEFAULT_DRAFT, DEFAULT_TARGET
from services.engine.sequence import CachedSequence
from services.engine.torch_engine import TorchEngine
from services.model.host import LoadedModel, load
from services.model.store import resolve
from services.target.session import TargetSession

# Tokens that the draft reads in a forward.
_WIDTH = 32


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--draft", default=DEFAULT_DRAFT)
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=24, help="the most prompts, evenly over the file's categories")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each prompt")
    arguments = parser.parse_args()
    target, draft = _load(arguments.target), _load(arguments.draft)
    inputs = [prompts.as_input(one) for one in prompts.read(arguments.prompts, arguments.count)]
    right = "".join(asyncio.run(trace(target, draft, one, arguments.tokens)) for one in inputs)
    if not right:
        raise SystemExit("the target says nothing to these prompts: take others")
    title = f"{arguments.target} <- {arguments.draft}, {len(inputs)} prompts, {right.count('1') / len(right):.0%} right"
    arguments.json.write_text(json.dumps({"title": title, "right": right}, indent=1) + "\n")
    print(title)
    for model in (target, draft):
        model.scheduler.close()


def _load(name: str) -> LoadedModel:
    directory = resolve(name)
    return load(directory, name, lambda: TorchEngine(directory, slot_count=1))


async def trace(target: LoadedModel, draft: LoadedModel, input_: str | Chat, tokens: int) -> str:
    """Of one prompt: "1" for each of the draft's tokens that it would have said, "0" for the others."""
    request = Request(input_, max_tokens=tokens, speculation=SpeculationParameters(Mode.OFF))
    with closing(TargetSession(target.model, target.scheduler, target.sampler(SamplingParameters(), 0))) as verifier:
        events = [event async for event in generate(request, target.model, verifier)]
    said = "".join(event.text for event in events if isinstance(event, Delta))
    context = DraftContext(draft.model.vocabulary, render(request, draft.model, target.model))
    prompt = context.ids
    context.append(said.encode())
    ids = context.ids
    return await rights(draft, ids, max(common_prefix_length(prompt, ids), 1))


async def rights(draft: LoadedModel, ids: Sequence[int], begin: int) -> str:
    """Whether the draft would have said each of the ids from `begin` on, behind those before it."""
    found = ""
    with closing(CachedSequence(draft.scheduler, list(ids[:begin]))) as sequence:
        for start in range(begin, len(ids), _WIDTH):
            extra = ids[start : start + _WIDTH]
            done = await sequence.forward(extra, lambda logits: logits.argmax(axis=1).tolist())
            assert done.extra_count == len(extra)
            found += "".join(str(int(guess == id_)) for guess, id_ in zip(done.value, extra, strict=False))
            sequence.accept(extra, len(extra))
    return found


if __name__ == "__main__":
    main()
