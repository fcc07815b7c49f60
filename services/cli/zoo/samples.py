"""Runs all pairs over a bridge, and keeps every sample in a file, so that a stopped measurement resumes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import DraftBridgeError
from draftbridge import Client, Event
from draftbridge.v1 import bridge_pb2

ALONE, AUTO, TURNS = "alone", "auto", "turns"
# Tokens of a turn in the way TURNS, which shows how often candidates are right even where AUTO uses none.
TURN_TOKENS = 4
_WAYS: dict[str, dict[str, Any]] = {
    ALONE: {"speculation": "off"},
    AUTO: {"sources": ["draft"]},
    TURNS: {"speculation": "lockstep", "num_assistant_tokens": TURN_TOKENS},
}


class InvalidSamples(DraftBridgeError, reason="INVALID_SAMPLES"):
    """A file of samples cannot be read, or is of another measurement."""


class Key(NamedTuple):
    """What a sample is of. `prompt`: the beginning of the SHA-256 of the prompt's JSON."""

    target: str
    draft: str
    way: str
    prompt: str
    temperature: float
    tokens: int


@dataclass(frozen=True)
class Sample:
    """One generation. Times in nanoseconds; `token_count` and `elapsed_ns` leave the target's first pass out.

    `spans`: pieces of `text` as their number of UTF-8 bytes and their source, empty if the target wrote them itself.
    """

    target: str
    draft: str
    way: str
    prompt: str
    temperature: float
    tokens: int
    category: str
    token_count: int
    elapsed_ns: int
    pass_count: int
    draft_pass_count: int
    candidate_count: int
    accepted_count: int
    accepted_byte_count: int
    proposed_count: int
    compute_ns: int
    verify_ns: int
    network_ns: int
    waited_ns: int
    byte_count: int
    near_ties: int
    text: str
    accepted_per_position: list[int] = field(default_factory=list)
    spans: list[tuple[int, str]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return Key(self.target, self.draft, self.way, self.prompt, self.temperature, self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Returns the speed after the first pass; 0 if there was only one."""
        return 1e9 * self.token_count / self.elapsed_ns if self.token_count and self.elapsed_ns else 0.0


@dataclass(frozen=True)
class Plan:
    """What to measure: names of models, prompts, temperatures, and the tokens of a text. `ways`: of each pair."""

    targets: Sequence[str]
    drafts: Sequence[str]
    prompts: Sequence[Mapping[str, Any]]
    temperatures: Sequence[float]
    tokens: int
    ways: Sequence[str] = (AUTO, TURNS)
    refused: frozenset[tuple[str, str]] = frozenset()

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of a target and a draft that the bridge does not refuse."""
        return [(a, b) for a in self.targets for b in self.drafts if (a, b) not in self.refused]

    def keys(self) -> list[tuple[Key, Mapping[str, Any]]]:
        """Returns all samples to take, in order, with their prompts.

        The ways of one prompt follow one another, so that changes in the machine's speed affect them alike; the order
        rotates from prompt to prompt.
        """
        found = []
        for target in self.targets:
            drafts = [draft for one, draft in self.pairs() if one == target]
            ways = [("", ALONE), *((draft, way) for draft in drafts for way in self.ways)]
            for temperature in self.temperatures:
                for place, prompt in enumerate(self.prompts):
                    turn = place % len(ways)
                    found += [
                        (Key(target, draft, way, prompt_id(prompt), temperature, self.tokens), prompt)
                        for draft, way in (*ways[turn:], *ways[:turn])
                    ]
        return found


def prompt_id(prompt: Mapping[str, Any]) -> str:
    """Identifies a prompt by its content."""
    return sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()[:12]


def take(client: Client, key: Key, prompt: Mapping[str, Any]) -> Sample:
    """Generates one text. Before that, both models read the prompt, so that the time excludes it."""
    options: dict[str, Any] = {"target": key.target, "draft": key.draft, "messages": prompt.get("messages")}
    options |= {"temperature": key.temperature, "seed": int(key.prompt, 16)}
    text = prompt.get("prompt")
    way = _WAYS[key.way]
    client.generate(text, **options, max_tokens=3, speculation="off" if key.way == ALONE else "lockstep")
    return sample_of(client.stream(text, **options, max_tokens=key.tokens, **way), key, prompt.get("category", ""))


def sample_of(events: Iterable[Event], key: Key, category: str) -> Sample:
    """Returns what the events of one generation tell."""
    text, token_count, first_count, spans = "", 0, 0, []
    for event in events:
        if isinstance(event, bridge_pb2.GenerateDelta):
            text, token_count = text + event.text, token_count + len(event.token_ids)
            first_count = first_count or len(event.token_ids)
            spans += [(span.byte_count, span.source) for span in event.spans]
        elif isinstance(event, bridge_pb2.GenerateFinished):
            did = event.speculation
    drafted = next((one for one in did.sources if one.name == "draft"), bridge_pb2.SourceStatistics())
    return Sample(
        **key._asdict(),
        category=category,
        token_count=token_count - first_count,
        elapsed_ns=did.elapsed_ns - did.first_token_ns,
        pass_count=did.target_pass_count - 1,
        draft_pass_count=drafted.num_drafts,
        candidate_count=drafted.num_draft_tokens,
        accepted_count=drafted.num_accepted_tokens,
        accepted_byte_count=drafted.accepted_byte_count,
        proposed_count=drafted.proposed_token_count,
        compute_ns=drafted.compute_ns,
        verify_ns=did.verify_ns,
        network_ns=did.network_ns,
        waited_ns=did.waited_ns,
        byte_count=did.generated_byte_count,
        near_ties=did.near_ties,
        text=text,
        accepted_per_position=list(did.num_accepted_tokens_per_position),
        spans=spans,
    )


class SampleFile:
    """A file with one sample in each line, written as they are taken.

    The first line names their models. A file of other models, or of the same on another machine, is refused.
    """

    def __init__(self, path: Path, models: Mapping[str, Any]) -> None:
        self._path = path
        self.samples: dict[Key, Sample] = {}
        # Times are measured anew at each start of a server.
        known = {name: {key: one[key] for key in one if key != "costs"} for name, one in models.items()}
        wanted = json.dumps({"models": known}, sort_keys=True)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted + "\n")
            return
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):  # the process was killed while it wrote
            text = text[: text.rfind("\n") + 1]
            path.write_text(text, encoding="utf-8")
        first, *lines = text.splitlines()
        try:
            if json.loads(first)["models"] != json.loads(wanted)["models"]:
                raise InvalidSamples(
                    f"{path} has samples of other models or of another machine: give another --output, or delete it"
                )
            for line in lines:
                sample = Sample(**json.loads(line))
                self.samples[sample.key] = sample
        except (ValueError, TypeError, LookupError) as error:
            raise InvalidSamples(f"{path} cannot be read ({error}): give another --output, or delete it") from error

    def add(self, sample: Sample) -> None:
        """Appends a sample."""
        self.samples[sample.key] = sample
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(sample)) + "\n")


def measure(client: Client, plan: Plan, file: SampleFile) -> Iterator[Sample | None]:
    """Yields once for each sample of the plan: the new sample, or None if the file had it."""
    for key, prompt in plan.keys():
        if key in file.samples:
            yield None
            continue
        sample = take(client, key, prompt)
        file.add(sample)
        yield sample
