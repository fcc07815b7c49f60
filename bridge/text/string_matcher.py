"""Finds given strings, such as control tokens, in texts."""

import re
from collections.abc import Iterable, Sequence, Set
from functools import cached_property


class StringMatcher:
    """Finds every occurrence of given strings in a text.

    Strings are looked up by their beginning and length: there can be thousands, and a regular expression that lists
    them all is slow. Beginnings are as long as the shortest string with the same first character.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = frozenset(string for string in strings if string)
        self._shortest = dict[str, int]()
        for string in self.strings:
            self._shortest[string[0]] = min(len(string), self._shortest.get(string[0], len(string)))
        self._after = dict[str, set[int]]()
        for string in self.strings:
            self._after.setdefault(string[: self._shortest[string[0]]], set()).add(len(string))
        first = "".join(map(re.escape, sorted(self._shortest)))
        self._first = re.compile(f"[{first}]" if first else r"(?!)")
        self._lengths = sorted({len(string) for string in self.strings})

    def find(self, text: str) -> set[tuple[int, int]]:
        """Returns the start and end, in characters, of every occurrence, overlapping ones included."""
        found = set[tuple[int, int]]()
        for match_ in self._first.finditer(text):
            start = match_.start()
            beginning = text[start : start + self._shortest[match_[0]]]
            ends = (start + length for length in self._after.get(beginning, ()))
            found.update((start, end) for end in ends if end <= len(text) and text[start:end] in self.strings)
        return found

    def may_join(self, text: str) -> tuple[bool, bool]:
        """Returns whether the text's start, and its end, could become part of a string next to one of the strings."""
        starts, ends = self._joining
        return text.startswith(starts), text.endswith(ends)

    def may_be_cut(self, text: str) -> tuple[bool, bool]:
        """Returns whether the text's start may be the end of a string that was cut, and its end the beginning."""
        ends, beginnings = self._cut
        return text.startswith(ends), text.endswith(beginnings)

    @cached_property
    def _cut(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the ends of all strings, and their beginnings, without the whole strings."""
        cuts = [(string[:cut], string[cut:]) for string in self.strings for cut in range(1, len(string))]
        return tuple({end for _, end in cuts}), tuple({beginning for beginning, _ in cuts})

    @cached_property
    def _joining(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the text starts that the end of a string completes, and the text ends that a string's start does."""
        reversed_ = _completed_by_next({string[::-1] for string in self.strings}, self._lengths)
        return tuple(end[::-1] for end in reversed_), tuple(_completed_by_next(self.strings, self._lengths))


def _completed_by_next(strings: Set[str], lengths: Sequence[int]) -> set[str]:
    """Returns the prefixes of the strings whose remainder is a prefix of a string, or begins with a whole string."""
    prefixes = {string[:length] for string in strings for length in range(1, len(string) + 1)}
    halves = ((string[:cut], string[cut:]) for string in strings for cut in range(1, len(string)))
    return {left for left, right in halves if right in prefixes or any(right[:length] in strings for length in lengths)}
