"""Shortens texts that may quote others, such as errors, so that they fit into a log and a status."""

# The most bytes of a text, and what is kept of the end of a longer one, because errors end with the remedy.
_MAX_BYTES, _END_BYTES = 600, 200
_ELLIPSIS = " ... "


def clipped(text: str) -> str:
    """Returns the text without its middle if it is too long, and with lone surrogates replaced for UTF-8."""
    data = text.encode(errors="replace")
    if len(data) <= _MAX_BYTES:
        return data.decode()
    begin, end = data[: _MAX_BYTES - _END_BYTES - len(_ELLIPSIS)], data[-_END_BYTES:]
    return begin.decode(errors="ignore") + _ELLIPSIS + end.decode(errors="ignore")


def one_line(text: str) -> str:
    """Returns the text as one printable line."""
    return "".join(char if char.isprintable() else " " for char in text)
