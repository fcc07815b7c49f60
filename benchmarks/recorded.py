"""A file of traces: where drafts are right on texts of real targets, and with what confidence.

`benchmarks.traces` writes it as JSON: `pairs`, each with `target`, `draft` and `texts`. A text has a `category`, the
number `target_tokens`, and, with one entry per token of the draft, `right`, a string of "1" and "0", and `confidence`,
the probability of the token that the draft would have proposed, in 255ths as two hex digits.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """What a target wrote for one prompt, in the tokens of a draft.

    `right`: "1" where the draft's most probable token is the next token of the text, "0" elsewhere. `confidence`: the
    probability of that most probable token, in [0, 1].
    """

    category: str
    right: str
    confidence: tuple[float, ...]
    target_tokens: int

    def __post_init__(self) -> None:
        if len(self.right) != len(self.confidence):
            raise ValueError(f"a text has {len(self.right)} tokens but {len(self.confidence)} confidences")


@dataclass(frozen=True)
class Pair:
    """A target, a draft, and the target's texts in the draft's tokens."""

    target: str
    draft: str
    texts: tuple[Text, ...]

    @property
    def name(self) -> str:
        return f"{self.target} <- {self.draft}"

    @property
    def right(self) -> str:
        """Concatenated over all texts."""
        return "".join(text.right for text in self.texts)

    @property
    def confidence(self) -> tuple[float, ...]:
        """Concatenated over all texts."""
        return tuple(value for text in self.texts for value in text.confidence)

    @property
    def acceptance(self) -> float:
        """The fraction of tokens that are right."""
        return self.right.count("1") / len(self.right)


def read(path: Path) -> dict[str, Pair]:
    """Returns the pairs of a file, by name."""
    pairs = []
    for pair in json.loads(path.read_text())["pairs"]:
        texts = tuple(
            Text(
                category=text["category"],
                right=text["right"],
                confidence=tuple(part / 255 for part in bytes.fromhex(text["confidence"])),
                target_tokens=text["target_tokens"],
            )
            for text in pair["texts"]
        )
        pairs.append(Pair(pair["target"], pair["draft"], texts))
    return {pair.name: pair for pair in pairs}


def write(path: Path, pairs: Sequence[Pair], title: str) -> None:
    """Writes a file with one line per text, so that a diff is readable."""
    written = [
        {
            "target": pair.target,
            "draft": pair.draft,
            "texts": [
                {
                    "category": text.category,
                    "target_tokens": text.target_tokens,
                    "right": text.right,
                    "confidence": bytes(round(255 * value) for value in text.confidence).hex(),
                }
                for text in pair.texts
            ],
        }
        for pair in pairs
    ]
    lines = ["{", f' "title": {json.dumps(title)},', ' "pairs": [']
    for index, pair in enumerate(written):
        lines.append(f'  {{"target": {json.dumps(pair["target"])}, "draft": {json.dumps(pair["draft"])}, "texts": [')
        lines.append(",\n".join(f"   {json.dumps(text)}" for text in pair["texts"]))
        lines.append("  ]}" + ("," if index + 1 < len(written) else ""))
    path.write_text("\n".join([*lines, " ]", "}"]) + "\n")
