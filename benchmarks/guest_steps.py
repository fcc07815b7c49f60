"""Measures what a step of a guest costs: the time that `CandidateClient.step` takes, with one and many sequences.

    python -m benchmarks.guest_steps --tokenizer tokenizer.json [--text FILE ...] [--sequences 1 64] [--json FILE]

A bridge without models runs in its own process. The engine recites parts of the texts, by default the documentation of
this repository, and pauses `--forward-ms` between steps as its forward would take. Sequences begin with a prompt of
`--prompt` tokens. A step includes messages both ways, prompt lookup, translation and planning; the first `--warm` steps
of each number of sequences are left out. "in time" counts the answers within the deadline of 2 ms by default.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median, quantiles

from bridge.text.vocabulary import Vocabulary
from draftbridge.candidates import CandidateClient, SequenceStep
from draftbridge.v1 import model_pb2
from services.cli.processes import launched

_TEXTS = sorted(Path("docs").rglob("*.md"))


class _Sequence:
    """A part of the text that is recited token by token; right candidates are accepted."""

    def __init__(self, id_: int, truth: list[int], prompt: int) -> None:
        self.id, self._truth, self._prompt = id_, truth, prompt
        self.ids = truth[:prompt]
        self.accepted = 0

    def step(self) -> SequenceStep:
        return SequenceStep(self.id, self.ids, generated_token_count=len(self.ids) - self._prompt)

    def forward(self, candidates: tuple[int, ...]) -> None:
        truth, count = self._truth, len(self.ids)
        right = 0
        while right < len(candidates) and candidates[right] == truth[(count + right) % len(truth)]:
            right += 1
        self.accepted += right
        self.ids += [truth[(count + place) % len(truth)] for place in range(right + 1)]


def measure(
    client: CandidateClient, truth: list[int], count: int, options: argparse.Namespace
) -> dict[str, float | int]:
    """Returns the times of steps with `count` sequences, in milliseconds."""
    stride = max(len(truth) // count, 1)
    sequences = [
        _Sequence(count * 1000 + index, truth[index * stride :] + truth[: index * stride], options.prompt)
        for index in range(count)
    ]
    times, late = [], 0
    for number in range(options.warm + options.steps):
        before, began = client.counts.late_count, time.perf_counter()
        found = client.step([one.step() for one in sequences], deadline=options.deadline_ms / 1000)
        if number >= options.warm:
            times.append(1000 * (time.perf_counter() - began))
            late += client.counts.late_count - before
        for one in sequences:
            one.forward(found[one.id].token_ids if one.id in found else ())
        time.sleep(options.forward_ms / 1000)  # in place of the engine's forward
    client.step([], ended=[one.id for one in sequences], deadline=0)
    accepted = sum(one.accepted for one in sequences) / (len(sequences) * (options.warm + options.steps))
    return {
        "sequences": count,
        "median": median(times),
        "p90": quantiles(times, n=10)[8],
        "p99": quantiles(times, n=100)[98],
        "in time": 1 - late / options.steps,
        "accepted per forward": accepted,
    }


def main() -> None:
    """Runs the measurement and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=_TEXTS)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--deadline-ms", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    content = options.tokenizer.read_bytes()
    vocabulary = Vocabulary(content)
    truth = list(vocabulary.pieces(b"\n".join(path.read_bytes() for path in options.text)).ids)
    model = model_pb2.Model(name="reciting", context_length=1 << 20, vocabulary_size=vocabulary.size)
    results = []
    with launched("bridge", "bridge", "--until-stdin-closes", "--listen", "127.0.0.1:0") as (address, _):
        client = CandidateClient(address, model, content)
        assert client.connect(60), "the bridge did not accept the engine"
        results = [measure(client, truth, count, options) for count in options.sequences]
        client.close()
    print(f"milliseconds of a step, {options.steps} steps; a forward takes {options.forward_ms:g} ms")
    print(f"| {' | '.join(results[0])} |\n|{'---|' * len(results[0])}")
    for result in results:
        print(f"| {' | '.join(f'{value:.2f}' for value in result.values())} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
