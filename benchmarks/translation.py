"""Measures translation for every ordered pair of real tokenizers, against the method of Transformers.

    python -m benchmarks.translation [--rounds 200] [--tokens 8] [--json FILE] [--only NAME ...]

In a round the draft proposes tokens, they become candidates in the target's ids, the target commits some of them and a
token of its own, and the draft's context is updated. The text is that of this repository's files; in half of the rounds
part of the proposal is wrong. The time includes everything between incoming and outgoing ids, in both directions. The
same rounds then run through Transformers' generator for two tokenizers
(`AssistedCandidateGeneratorDifferentTokenizers`), and both drafts' contexts are compared with the text. The second
table is about the prefix cache.
"""

import argparse
import json
import os
import platform
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import AssistedCandidateGeneratorDifferentTokenizers

from bridge.sources.draft import DraftEpoch
from bridge.sources.source import offer_of
from bridge.tape import Tape
from bridge.text.models import Model
from bridge.text.prefix_cache import PrefixCache
from bridge.text.translation import DraftContext, candidates
from bridge.text.vocabulary import Vocabulary
from tests.support import real

SIZES = (1_000, 100_000)
TURN = 200


@dataclass
class Way:
    """Seconds of each round, and the number of rounds in which the draft's context did not spell the text."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


@dataclass(frozen=True)
class Round:
    """The ids that the draft proposed and the ids that the target committed."""

    proposed: tuple[int, ...]
    committed: tuple[int, ...]


def corpus(length: int) -> str:
    """Returns English text and code from this repository's files, repeated to the given length."""
    root = Path(__file__).parents[1]
    files = sorted(
        [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("bridge/**/*.py"), *root.glob("services/**/*.py")]
    )
    text = "\n".join(file.read_text() for file in files)
    return (text * (length // len(text) + 1))[:length]


def script(text: str, start: int, draft: Vocabulary, target: Vocabulary, rounds: int, count: int) -> list[Round]:
    """Returns rounds over `text` from byte `start` on. Wrong proposals are tokens from elsewhere in the text."""
    chance = random.Random(0)
    data = text.encode()
    elsewhere = draft.pieces(data[:4000]).ids
    played: list[Round] = []
    position = start
    for _ in range(rounds):
        window = data[position : position + 400].decode(errors="ignore").encode()
        proposed = draft.pieces(window).ids[:count]
        if chance.random() < 0.5:
            wrong = chance.randrange(len(proposed))
            proposed[wrong:] = chance.choices(elsewhere, k=len(proposed) - wrong)
        offered = candidates(target, draft.spell(proposed))
        committed: list[int] = []
        for id_ in offered:
            if not window.startswith(target.spell([*committed, id_])):
                break
            committed.append(id_)
        rest = target.pieces(window[len(target.spell(committed)) :])
        committed.append(rest.ids[0])
        position += len(target.spell(committed))
        played.append(Round(tuple(proposed), tuple(committed)))
    return played


def ours(prompt: str, played: Sequence[Round], draft: Model, target: Model) -> Way:
    """Runs the rounds through the bridge's functions, as its loop calls them."""
    way = Way()
    tape = Tape(target.vocabulary, target.vocabulary.prompt(prompt, framed=True).ids)
    context = DraftContext(draft.vocabulary, draft.vocabulary.prompt(prompt, framed=True))
    syncs = [(0, context.ids)]
    ends = [0]
    for number, one in enumerate(played, start=1):
        started = perf_counter()
        epoch = DraftEpoch(number, len(one.proposed), True, b"")
        for id_ in one.proposed:
            epoch.add(id_, draft.vocabulary.token_bytes(id_), 1.0)
        if ahead := epoch.ahead():
            offer_of(target.vocabulary, [ahead])
        tape.commit(one.committed)
        syncs.append(context.append(tape.data[ends[-1] :], one.proposed))
        way.seconds.append(perf_counter() - started)
        ends.append(len(tape.data))
    # Checked afterwards: reading the whole context between rounds would evict the processor's caches.
    held: list[int] = []
    spelled = prompt.encode() + bytes(tape.data)
    for proposed, (keep, appended), end in zip([(), *(one.proposed for one in played)], syncs, ends, strict=True):
        held = [*(held + list(proposed))[:keep], *appended]
        way.wrong += not reads(draft.vocabulary, held, spelled[: len(prompt.encode()) + end])
    return way


def theirs(
    prompt: str, played: Sequence[Round], draft: Vocabulary, tokenizers: Sequence[Any], target: Vocabulary
) -> Way:
    """Runs the rounds through Transformers' functions, as `get_candidates` calls them, without the models."""
    way = Way()
    source, destination = tokenizers
    generator = object.__new__(AssistedCandidateGeneratorDifferentTokenizers)
    generator.target_tokenizer, generator.assistant_tokenizer = source, destination
    generator.prev_target_ids_len = generator.prev_assistant_ids = None
    generator.target_lookbehind = generator.assistant_lookbehind = 10
    generator.main_model_max_length = None
    ids = list(target.prompt(prompt, framed=True).ids)
    spelled = prompt.encode()
    contexts = []
    for one in played:
        input_ids, proposed = torch.tensor([ids]), torch.tensor([one.proposed])
        started = perf_counter()
        assistant_ids, _ = generator._prepare_assistant_input_ids(input_ids)
        between = perf_counter()
        contexts.append((assistant_ids[0].tolist(), spelled))
        sequences = torch.cat([assistant_ids, proposed], dim=-1)
        generator.prev_assistant_ids = assistant_ids
        resumed = perf_counter()
        generator._process_assistant_outputs(input_ids, sequences)
        way.seconds.append(between - started + perf_counter() - resumed)
        generator.prev_target_ids_len = input_ids.shape[1]
        generator.prev_assistant_ids = sequences
        ids += one.committed
        spelled += target.spell(one.committed)
    way.wrong = sum(not reads(draft, held, read) for held, read in contexts)
    # The first round converts the whole prompt.
    way.seconds.pop(0)
    return way


def reads(vocabulary: Vocabulary, ids: Sequence[int], data: bytes) -> bool:
    """Returns whether ids spell the text `data`, except for an incomplete last character and a leading space."""
    spelled = vocabulary.spell(ids)
    if vocabulary.dummy_prefix:
        spelled = spelled.removeprefix(b" ")
    return data.startswith(spelled) and data[len(spelled) :].decode(errors="ignore") == ""


def cached(name: str, text: str) -> dict[str, float]:
    """Times a conversation and one more turn, encoded in full by the library and after a cached prefix by us."""
    vocabulary = real.vocabulary(name)
    library = Tokenizer.from_str(real.tokenizer_json(name).decode())
    conversation, turns = text[: SIZES[-1]], [text[i : i + TURN] for i in range(0, 20 * TURN, TURN)]

    def best(call: Callable[[], object]) -> float:
        started = perf_counter()
        call()
        return perf_counter() - started

    whole = [best(lambda turn=turn: library.encode(conversation + turn)) for turn in turns[:5]]  # type: ignore[misc]
    first, later = [], []
    for turn in turns:
        vocabulary.prefixes = PrefixCache()
        first.append(best(lambda: vocabulary.prompt(conversation, framed=True)))
        later.append(best(lambda turn=turn: vocabulary.prompt(conversation + turn, framed=True)))  # type: ignore[misc]
        assert vocabulary.prompt(conversation + turn, framed=True).ids == library.encode(conversation + turn).ids
    return {
        "library_ms": median(whole) * 1e3,
        "first_ms": median(first) * 1e3,
        "next_turn_ms": median(later) * 1e3,
        "ratio": median(later) / median(whole),
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8, help="tokens that the draft proposes per round")
    parser.add_argument("--only", nargs="*", default=real.NAMES, help="tokenizers to use")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    arguments = parser.parse_args()
    console = Console(width=130)
    text = corpus(SIZES[-1] + arguments.rounds * arguments.tokens * 16)
    models = {name: Model(name, 1 << 30, real.vocabulary(name).size, real.vocabulary(name)) for name in arguments.only}
    library = {
        name: PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(real.tokenizer_json(name).decode()))
        for name in arguments.only
    }
    results = []
    for target, draft in permutations(models.values(), 2):
        row: dict[str, Any] = {"target": target.name, "draft": draft.name}
        for size in SIZES:
            # The rounds are the same for every size of context.
            prompt, start = text[SIZES[-1] - size : SIZES[-1]], len(text[: SIZES[-1]].encode())
            played = script(text, start, draft.vocabulary, target.vocabulary, arguments.rounds, arguments.tokens)
            tokenizers = (library[target.name], library[draft.name])
            way = ours(prompt, played, draft, target)
            other = theirs(prompt, played, draft.vocabulary, tokenizers, target.vocabulary)
            row[str(size)] = {
                "median_us": median(way.seconds) * 1e6,
                "p95_us": quantiles(way.seconds, n=20)[-1] * 1e6,
                "wrong": way.wrong,
                "transformers_median_us": median(other.seconds) * 1e6,
                "transformers_wrong": other.wrong,
                "rounds": len(played),
            }
        results.append(row)
    short, long = (str(size) for size in SIZES)
    table = Table(
        "target <- draft",
        f"µs at {short}",
        f"µs at {long}",
        "growth",
        "p95",
        "wrong",
        "Transformers",
        "ratio",
        "its wrong",
        title=f"A round of {arguments.tokens} tokens, medians of {arguments.rounds}, characters of context as given",
        box=box.SIMPLE,
    )
    for row in results:
        near, far = row[short], row[long]
        table.add_row(
            f"{row['target']} <- {row['draft']}",
            f"{near['median_us']:.0f}",
            f"{far['median_us']:.0f}",
            f"{far['median_us'] / near['median_us']:.2f}",
            f"{far['p95_us']:.0f}",
            f"{near['wrong'] + far['wrong']}",
            f"{far['transformers_median_us']:.0f}",
            f"{far['transformers_median_us'] / far['median_us']:.1f}x",
            f"{(near['transformers_wrong'] + far['transformers_wrong']) / (near['rounds'] + far['rounds']):.0%}",
        )
    console.print(table)
    prefixes = {name: cached(name, text) for name in models}
    table = Table(
        "tokenizer", "library, whole", "ours, first time", "ours, next turn", "of whole", box=box.SIMPLE,
        title=f"A conversation of {SIZES[-1]} characters and a turn of {TURN}, in ms",
    )  # fmt: skip
    for name, one in prefixes.items():
        times = (f"{one['library_ms']:.1f}", f"{one['first_ms']:.1f}", f"{one['next_turn_ms']:.2f}")
        table.add_row(name, *times, f"{one['ratio']:.1%}")
    console.print(table)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        arguments.json.write_text(
            json.dumps(
                {"machine": machine, "arguments": asdict_of(arguments), "pairs": results, "prefixes": prefixes},
                indent=1,
            )
        )


def asdict_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the run."""
    return {"rounds": arguments.rounds, "tokens": arguments.tokens, "only": list(arguments.only)}


if __name__ == "__main__":
    main()
