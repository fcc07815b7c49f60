"""Where drafts are right on the texts of real targets, and how sure they are of it: a file of pairs.

`benchmarks.traces` writes it. In JSON: `pairs`, each with `target`, `draft` and `texts`; of a text its `category`, the
number of `target_tokens` that it has, and by token of the draft `right`, a string of ones and zeros, and `confidence`,
the probability in 255ths that the draft gave to the token that it would have proposed, in two hex digits each.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Text:
    """What a target wrote for one prompt, in the tokens of a draft that reads along.

    `right`: "1" where the draft's most probable token is the one that comes, "0" elsewhere. `confidence`: how probable
    it found that token, in [0, 1].
    """

    category: str
    right: str
    confidence: tuple[float, ...]
    target_tokens: int

    def __post_init__(self) -> None:
        if len(self.right) != len(self.confidence):
            raise ValueError(f"{len(self.right)} tokens are judged, and {len(self.confidence)} confidences recorded")


@dataclass(frozen=True)
class Pair:
    """A target, a draft, and the texts of the one as the other reads them."""

    target: str
    draft: str
    texts: tuple[Text, ...]

    @property
    def name(self) -> str:
        return f"{self.target} <- {self.draft}"

    @property
    def right(self) -> str:
        """Of all texts, one after the other."""
        return "".join(text.right for text in self.texts)

    @property
    def confidence(self) -> tuple[float, ...]:
        """Of all texts, one after the other."""
        return tuple(value for text in self.texts for value in text.confidence)

    @property
    def acceptance(self) -> float:
        """The share of right tokens."""
        return self.right.count("1") / len(self.right)


def read(path: Path) -> dict[str, Pair]:
    """The pairs of a file, by name."""
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
    """A line for each text, so that changes can be seen."""
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
