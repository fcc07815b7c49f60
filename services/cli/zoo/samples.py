"""Runs all pairs over a bridge, and keeps every sample in a file, so that a stopped measurement resumes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from bridge.errors import DraftBridgeError
from draftbridge import CallError, Client, Event
from draftbridge.v1 import bridge_pb2
from services.cli import bench
from services.cli.terminal import writing

# Descriptions of models by role ("target" or "draft") and name: one name may have two servers, which differ.
Models: TypeAlias = Mapping[tuple[str, str], Mapping[str, Any]]
ALONE, AUTO, TURNS = "alone", "auto", "turns"
# The version of a file of samples. One of another version is refused.
_FORMAT = 3
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
    waited_ns: int
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
    """What to measure: names of models, prompts, temperatures, and the tokens of a text. `ways`: of each pair.

    `refused`: pairs that cannot run; with an empty draft, a target that cannot.
    """

    targets: Sequence[str]
    drafts: Sequence[str]
    prompts: Sequence[Mapping[str, Any]]
    temperatures: Sequence[float]
    tokens: int
    ways: Sequence[str] = (AUTO, TURNS)
    refused: frozenset[tuple[str, str]] = frozenset()

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of a target and a draft that are not refused."""
        return [(a, b) for a in self.targets for b in self.drafts if (a, b) not in self.refused]

    def keys(self) -> list[tuple[Key, Mapping[str, Any]]]:
        """Returns all samples to take, in order, with their prompts.

        The ways of one prompt follow one another, so that changes in the machine's speed affect them alike; the order
        rotates from prompt to prompt.
        """
        found = []
        for target in self.targets:
            drafts = [draft for one, draft in self.pairs() if one == target]
            if (target, "") in self.refused:
                continue
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


def take(client: Client, key: Key, prompt: Mapping[str, Any]) -> Sample | str:
    """Generates one text, and returns its sample, or why there is none.

    Before that, both models read the prompt. Raises `CallError` if the bridge itself does not answer.
    """
    options: dict[str, Any] = {"target": key.target, "draft": key.draft, "messages": prompt.get("messages")}
    options |= {"temperature": key.temperature, "seed": int(key.prompt, 16)}
    text = prompt.get("prompt")
    way = _WAYS[key.way]
    try:
        bench.warm(client, text, drafted=key.way != ALONE, **options)
        return sample_of(client.stream(text, **options, max_tokens=key.tokens, **way), key, prompt.get("category", ""))
    except CallError as error:
        client.models()
        return str(error)


def sample_of(events: Iterable[Event], key: Key, category: str) -> Sample | str:
    """Returns the sample that results from the events of one generation, or why the draft took no part in all of it."""
    text, token_count, first_count, spans = "", 0, 0, []
    for event in events:
        if isinstance(event, bridge_pb2.GenerateDelta):
            text, token_count = text + event.text, token_count + len(event.token_ids)
            first_count = first_count or len(event.token_ids)
            spans += [(span.byte_count, span.source) for span in event.spans]
        elif isinstance(event, bridge_pb2.GenerateFinished):
            did = event.speculation
    if did.note:
        return did.note
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
        waited_ns=did.waited_ns,
        near_ties=did.near_ties,
        text=text,
        accepted_per_position=list(did.num_accepted_tokens_per_position),
        spans=spans,
    )


class SampleFile:
    """A file of samples and failures, one in each line, written as they are taken.

    `models`: those that are there now. A file with samples of other models of the same names, of another processor, or
    in another format is refused with `InvalidSamples`.
    """

    def __init__(self, path: Path, models: Models, processor: str = "") -> None:
        self._path = path
        self.samples: dict[Key, Sample] = {}
        self.failures: dict[Key, str] = {}
        self._models: dict[tuple[str, str], Any] = {}
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, ValueError) as error:
            raise self._invalid(f"cannot be read ({error})") from error
        whole = text[: text.rfind("\n") + 1]  # the process may have been killed while it wrote
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        if whole:
            self._read(whole.splitlines(), processor)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"format": _FORMAT, "processor": processor})
        self._describe(models)

    def add(self, key: Key, found: Sample | str) -> None:
        """Appends a sample, or the error that it failed with."""
        line = {"sample": asdict(found)} if isinstance(found, Sample) else {"failed": key, "error": found}
        self._append(line)
        self._remember(line)

    def _read(self, lines: Sequence[str], processor: str) -> None:
        try:
            head = json.loads(lines[0])
            if head.get("format") != _FORMAT:
                raise self._invalid("was written by another version of DraftBridge")
            if head["processor"] != processor:
                raise self._invalid(f"has samples of another machine ({head['processor']})")
            for line in lines[1:]:
                self._remember(json.loads(line))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._invalid(f"cannot be read ({error})") from error

    def _remember(self, line: Mapping[str, Any]) -> None:
        if "sample" in line:
            sample = Sample(**line["sample"])
            self.samples[sample.key] = sample
            self.failures.pop(sample.key, None)
        elif "failed" in line:
            self.failures[Key(*line["failed"])] = line["error"]
        else:
            self._models[line["role"], line["model"]] = line["description"]

    def _describe(self, models: Models) -> None:
        used = {one for key in self.samples for one in (("target", key.target), ("draft", key.draft))}
        for (role, name), model in models.items():
            # Times are measured anew at each start of a server.
            now = {key: value for key, value in model.items() if key != "costs"}
            before = self._models.get((role, name))
            if before == now:
                continue
            if (role, name) in used:
                raise self._invalid(f"has samples of another {role} {name}: {before} instead of {now}")
            self._append({"role": role, "model": name, "description": now})

    def _append(self, line: Mapping[str, Any]) -> None:
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _invalid(self, problem: str) -> InvalidSamples:
        return InvalidSamples(f"{self._path} {problem}: give another --output, or delete the file")


def measure(client: Client, plan: Plan, file: SampleFile) -> Iterator[Key]:
    """Yields each key of the plan when the file has its sample or failure. Repeats what failed in an earlier run."""
    for key, prompt in plan.keys():
        if key not in file.samples:
            file.add(key, take(client, key, prompt))
        yield key
