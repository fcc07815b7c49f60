"""Records, for each draft token of a target's text, whether the draft would have proposed it.

    python -m benchmarks.traces --json FILE [--pairs TARGET=DRAFT[,DRAFT...] ...] [--prompts FILE] [--count 24]
        [--tokens 128] [--engine llamacpp] [--threads 2]

The target's greedy text is encoded in the draft's tokens, and the draft reads it. For each token the file records
whether the draft's most probable token is the next one, and its probability; see `benchmarks.recorded` for the format.
FILE of prompts: see `benchmarks.prompts`; the default is its own 12. A model without a chat template
continues the last message of a chat as plain text. The file is written after each pair.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks import prompts
from benchmarks.recorded import Pair, Text, write
from bridge.generation import Delta, generate
from bridge.request import Request, render
from bridge.sampling.sampler import Logits, SamplingParameters
from bridge.text.chat import Chat
from bridge.text.common_prefix import common_prefix_length
from bridge.text.translation import DraftContext
from services.cli.terminal import DEFAULT_DRAFT, DEFAULT_TARGET
from services.engines.cpu import core_count
from services.engines.engine import Engine
from services.engines.sequence import CachedSequence
from services.model.host import LoadedModel, load
from services.model.target.session import TargetSession
from services.store.resolve import resolve, resolve_gguf

# Tokens that the draft reads per forward.
_WIDTH = 32


def main() -> None:
    """Records the traces and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", default=[f"{DEFAULT_TARGET}={DEFAULT_DRAFT}"], metavar="TARGET=DRAFT,...")
    parser.add_argument("--prompts", type=Path, default=prompts.OWN)
    parser.add_argument("--count", type=int, default=24, help="maximum number of prompts, spread over the categories")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--engine", choices=["llamacpp", "torch"], default="llamacpp")
    parser.add_argument("--threads", type=int, default=core_count())
    arguments = parser.parse_args()
    given = prompts.read(arguments.prompts, arguments.count)
    pairs: list[Pair] = []
    for one in arguments.pairs:
        name, _, drafts = one.partition("=")
        with closing(_Models(arguments.engine, arguments.threads)) as models:
            target = models.load(name)
            chats = bool(target.model.chat_template)
            asked = [prompts.as_input(one if chats else prompts.plain(one)) for one in given]
            texts_written = [asyncio.run(written(target, input_, arguments.tokens)) for input_ in asked]
            for draft_name in drafts.split(","):
                draft = models.load(draft_name)
                texts = []
                for prompt, input_, (data, count) in zip(given, asked, texts_written, strict=True):
                    right, confidence = asyncio.run(trace(target, draft, input_, data))
                    if right:
                        texts.append(Text(prompt["category"], right, tuple(confidence), count))
                if not texts:
                    raise SystemExit(f"{name} generates no text for these prompts: use others")
                pairs.append(Pair(name, draft_name, tuple(texts)))
                title = f"{len(given)} prompts of {arguments.tokens} tokens, greedy, {arguments.engine}"
                write(arguments.json, pairs, title)
                print(f"{pairs[-1].name}: {pairs[-1].acceptance:.0%} of {len(pairs[-1].right)} right", flush=True)


class _Models:
    """Loads models and closes them together."""

    def __init__(self, engine: str, threads: int) -> None:
        self._engine, self._threads = engine, threads
        self._loaded: list[LoadedModel] = []

    def load(self, name: str) -> LoadedModel:
        self._loaded.append(load(resolve(name), name, lambda: self._open(name)))
        return self._loaded[-1]

    def close(self) -> None:
        for model in self._loaded:
            model.scheduler.close()

    def _open(self, name: str) -> Engine:
        # Each takes seconds to import, and the other may not be installed.
        if self._engine == "llamacpp":
            from services.engines.llamacpp.engine import LlamaCppEngine

            return LlamaCppEngine(resolve_gguf(name), threads=self._threads, slot_count=1)
        from services.engines.torch.engine import TorchEngine

        return TorchEngine(resolve(name), threads=self._threads, slot_count=1)


async def written(target: LoadedModel, input_: str | Chat, tokens: int) -> tuple[bytes, int]:
    """Returns the target's greedy text and its number of tokens."""
    request = Request(input_, max_tokens=tokens)
    ids: list[int] = []
    with closing(TargetSession(target.model, target.scheduler, target.sampler(SamplingParameters(), 0))) as verifier:
        async for event in generate(request, target.model, verifier):
            if isinstance(event, Delta):
                ids += event.token_ids
    return target.model.vocabulary.spell(ids), len(ids)


def _best(logits: Logits) -> list[int]:
    found: list[int] = logits.argmax(axis=1).tolist()
    return found


async def trace(target: LoadedModel, draft: LoadedModel, input_: str | Chat, output: bytes) -> tuple[str, list[float]]:
    """Returns the result of `rights` for the draft tokens of what the target wrote."""
    context = DraftContext(draft.model.vocabulary, render(Request(input_), draft.model, target.model))
    prompt = context.ids
    context.append(output)
    ids = context.ids
    return await rights(draft, ids, max(common_prefix_length(prompt, ids), 1))


async def rights(draft: LoadedModel, ids: Sequence[int], begin: int) -> tuple[str, list[float]]:
    """Returns whether the draft would have proposed each of the ids from `begin` on after those before it.

    "1" where it would, "0" elsewhere; and the probability of the token that it would have proposed.
    """
    found, confidence = "", []
    with closing(CachedSequence(draft.scheduler, list(ids[:begin]))) as sequence:
        for start in range(begin, len(ids), _WIDTH):
            extra = ids[start : start + _WIDTH]
            done = await sequence.forward(extra, lambda logits: (_best(logits), _confidence(logits)))
            assert done.extra_count == len(extra)
            for guess, probability, id_ in zip(*done.value, extra, strict=False):
                found += str(int(guess == id_))
                confidence.append(probability)
            sequence.accept(extra, len(extra))
    return found, confidence


def _confidence(logits: Logits) -> list[float]:
    """Returns the probability of the most probable token at each position."""
    most = logits.max(axis=1, keepdims=True)
    found: list[float] = (1 / np.exp(logits - most).sum(axis=1)).tolist()
    return found


if __name__ == "__main__":
    main()
