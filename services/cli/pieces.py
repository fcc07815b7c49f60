"""Splits a generated text by the sources that proposed it, for the demo and the zoo's report."""

import codecs
from collections.abc import Iterable, Iterator


def pieces(text: str, spans: Iterable[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """Yields a text in pieces, each with its source; "" for the target's own.

    `spans`: numbers of UTF-8 bytes and their sources. A character that several spans share belongs to the one that
    completes it.
    """
    data, decoder, begin = text.encode(), codecs.getincrementaldecoder("utf-8")(), 0
    for byte_count, source in spans:
        if part := decoder.decode(data[begin : begin + byte_count]):
            yield part, source
        begin += byte_count
    if rest := decoder.decode(data[begin:], final=True):
        yield rest, ""
