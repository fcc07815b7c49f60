"""Where a text spells one of some given strings, such as control tokens."""

import re
from collections.abc import Iterable
from functools import cached_property


class Spelled:
    """Finds strings in texts. They are looked up by what they begin with and how long they are, because there can be
    thousands, and one alternation of all of them is slow."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = frozenset(one for one in strings if one)
        firsts = "".join(sorted({re.escape(one[0]) for one in self.strings}))
        self._firsts = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._lengths = sorted({len(one) for one in self.strings})

    def find(self, text: str) -> set[tuple[int, int]]:
        """Starts and ends, overlapping ones too."""
        return {
            (start, start + length)
            for match_ in self._firsts.finditer(text)
            for start in [match_.start()]
            for length in self._lengths
            if text[start : start + length] in self.strings
        }

    @cached_property
    def _open(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What makes another of the strings when one follows it, and when it follows one."""
        beginnings = {one[:cut] for one in self.strings for cut in range(1, len(one) + 1)}
        endings = {one[cut:] for one in self.strings for cut in range(len(one))}
        begins: set[str] = set()
        ends: set[str] = set()
        for one in self.strings:
            for cut in range(1, len(one)):
                left, right = one[:cut], one[cut:]
                if right in beginnings or any(right[:length] in self.strings for length in self._lengths):
                    begins.add(left)
                if left in endings or any(left[-length:] in self.strings for length in self._lengths):
                    ends.add(right)
        return tuple(begins), tuple(ends)

    def may_join(self, text: str) -> tuple[bool, bool]:
        """Whether the text's beginning, and its end, may become part of one of the strings beside another of them."""
        begins, ends = self._open
        return text.startswith(ends), text.endswith(begins)
