"""Measures what a step of a guest costs, and what its candidates gain, by the distance between engine and bridge.

    python -m benchmarks.guest_steps --tokenizer tokenizer.json [--text FILE ...] [--sequences 1 64] [--json FILE]
    python -m benchmarks.guest_steps --tokenizer tokenizer.json --draft-tokenizer DRAFT.json --sequences 1
        --round-trip-ms 0 1 5 20 --deadline-ms 2 50

The bridge is a process. The engine recites parts of the texts, by default the documentation of this repository, and
pauses `--forward-ms` between steps as its forward would take, whatever the number of candidates. Sequences begin with a
prompt of `--prompt` tokens. A step is a call of `CandidateClient.step`: messages both ways, prompt lookup, translation
and planning, and waiting for a draft. The first `--warm` steps of each number of sequences are left out.

With `--draft-tokenizer`, a draft service recites the text without computing, right with probability `--acceptance`;
without it there is prompt lookup alone. "round trip": milliseconds that a proxy puts between engine and bridge; 0:
without the proxy. "missed": answers that came after their deadline; after three in a row the client waits only now and
then until an answer is in time. "speed": tokens per second relative to the engine alone.
"""

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

from benchmarks.delay import DelayProxy
from bridge.text.vocabulary import Vocabulary
from draftbridge.candidates import CandidateClient, SequenceStep
from draftbridge.v1 import model_pb2
from services.cli.processes import launched

_TEXTS = sorted(Path("docs").rglob("*.md"))
_IDS = itertools.count(1)


class _Sequence:
    """A part of the text that is recited token by token; right candidates are accepted."""

    def __init__(self, id_: int, truth: list[int], prompt: int, max_candidates: int | None) -> None:
        self.id, self._truth, self._prompt = id_, truth, prompt
        self.ids = truth[:prompt]
        self.accepted, self._max_candidates = 0, max_candidates

    def step(self) -> SequenceStep:
        return SequenceStep(
            self.id,
            self.ids,
            generated_token_count=len(self.ids) - self._prompt,
            max_candidates=self._max_candidates,
        )

    def forward(self, candidates: tuple[int, ...]) -> None:
        truth, count = self._truth, len(self.ids)
        right = 0
        while right < len(candidates) and candidates[right] == truth[(count + right) % len(truth)]:
            right += 1
        self.accepted += right
        self.ids += [truth[(count + place) % len(truth)] for place in range(right + 1)]


def speed(accepted_count: float, step_ms: Sequence[float], forward_ms: float) -> float:
    """Returns the tokens per second of a sequence relative to one token for each forward and no steps."""
    return (len(step_ms) + accepted_count) * forward_ms / (sum(step_ms) + len(step_ms) * forward_ms)


def measure(
    client: CandidateClient, truth: list[int], count: int, deadline_ms: float, options: argparse.Namespace
) -> dict[str, float | int]:
    """Returns the times of steps with `count` sequences, in milliseconds."""
    stride = max(len(truth) // count, 1)
    sequences = [
        _Sequence(next(_IDS), truth[index * stride :] + truth[: index * stride], options.prompt, options.max_candidates)
        for index in range(count)
    ]
    times, warm_late, warm_accepted = [], 0, 0
    for number in range(options.warm + options.steps):
        if number == options.warm:
            warm_late, warm_accepted = client.counts.late_count, sum(one.accepted for one in sequences)
        began = time.perf_counter()
        found = client.step([one.step() for one in sequences], deadline=deadline_ms / 1000)
        if number >= options.warm:
            times.append(1000 * (time.perf_counter() - began))
        for one in sequences:
            one.forward(found[one.id].token_ids if one.id in found else ())
        time.sleep(options.forward_ms / 1000)  # in place of the engine's forward
    late = client.counts.late_count - warm_late  # counted when an answer arrives, mostly between steps
    client.step([], ended=[one.id for one in sequences], deadline=0)
    accepted = sum(one.accepted for one in sequences) - warm_accepted
    return {
        "sequences": count,
        "deadline": deadline_ms,
        "median": median(times),
        "p90": quantiles(times, n=10)[8],
        "p99": quantiles(times, n=100)[98],
        "missed": late / options.steps,
        "accepted per forward": accepted / count / options.steps,
        "speed": speed(accepted / count, times, options.forward_ms),
    }


@contextlib.contextmanager
def _bridge(text: bytes, options: argparse.Namespace) -> Iterator[str]:
    """Runs a bridge, with a draft that recites the text if it has a tokenizer. Yields its address."""
    with contextlib.ExitStack() as stack:
        draft = []
        if options.draft_tokenizer:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "text"
            file.write_bytes(text)
            arguments = ("--text", str(file), "--tokenizer", str(options.draft_tokenizer), "--role", "draft")
            acceptance = ("--acceptance", str(options.acceptance))
            found = launched("draft", *arguments, *acceptance, module="benchmarks.reciting")
            draft = ["--draft", stack.enter_context(found)[0]]
        arguments = ("bridge", *draft, "--until-stdin-closes", "--listen", "127.0.0.1:0")
        yield stack.enter_context(launched("bridge", *arguments))[0]


@contextlib.contextmanager
def _away(address: str, round_trip_ms: float) -> Iterator[str]:
    """Puts a proxy before a bridge. Yields its address."""
    if not round_trip_ms:
        yield address
        return
    with DelayProxy(address, round_trip_ms / 2000).running() as found:
        yield found


def main() -> None:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=_TEXTS)
    parser.add_argument("--draft-tokenizer", type=Path, help="only for one sequence, which begins as the text does")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--deadline-ms", type=float, nargs="+", default=[2.0])
    parser.add_argument("--max-candidates", type=int, help="the most that a forward can verify; default: no limit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.draft_tokenizer and options.sequences != [1]:
        parser.error("--draft-tokenizer needs --sequences 1: the draft recites the text from its beginning")
    content = options.tokenizer.read_bytes()
    vocabulary = Vocabulary(content)
    text = b"\n".join(path.read_bytes() for path in options.text)
    truth = list(vocabulary.pieces(text).ids)
    model = model_pb2.Model(name="reciting", context_length=1 << 20, vocabulary_size=vocabulary.size)
    results: list[dict[str, float | int]] = []
    with _bridge(text, options) as near:
        for round_trip in options.round_trip_ms:
            for deadline in options.deadline_ms:
                with _away(near, round_trip) as address:
                    client = CandidateClient(address, model, content)
                    assert client.connect(60), "the bridge did not accept the engine"
                    for count in options.sequences:
                        found = measure(client, truth, count, deadline, options)
                        results.append({"round trip": round_trip} | found)
                    client.close()
    print(f"milliseconds of a step, {options.steps} steps; a forward takes {options.forward_ms:g} ms")
    print(f"| {' | '.join(results[0])} |\n|{'---|' * len(results[0])}")
    for result in results:
        print(f"| {' | '.join(f'{value:.2f}' for value in result.values())} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
