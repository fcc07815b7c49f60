"""Finds environment variables with DraftBridge's prefix that nothing reads, because they are misspelt.

Unknown settings of a process are errors where they are read: `services.config_reading`, `services.cli.connection`. A
variable with another prefix may belong to another program, so it costs only a warning.
"""

from collections.abc import Mapping
from difflib import get_close_matches

from services.cli.connection import CLIENT_VARIABLES
from services.config import SECTIONS

_PREFIX = "DRAFTBRIDGE_"
_ALONE = ("CONFIG", "CACHE")
_GROUPS = (*(f"{section.upper()}_" for section in SECTIONS), "CLIENT_", "GUEST_")
# What tests and measurements read.
_INTERNAL = ("TEST_", "SOAK_", "FUZZ_", "OTHER_PYTHON", "CLIENTS_PYTHON", "MEASURING", "START_LOCK")


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each variable that has no effect, with the most similar one that has."""
    settings = [f"{section}_{name}".upper() for section, kind in SECTIONS.items() for name in kind.model_fields]
    clients = [name.removeprefix(_PREFIX) for name in CLIENT_VARIABLES]
    sentences = []
    for variable in sorted(environment):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in _ALONE or name.startswith((*_GROUPS, *_INTERNAL)):
            continue
        similar = get_close_matches(name, (*_ALONE, *clients, *settings), 1)
        known = ", ".join(_PREFIX + one for one in _ALONE) + " and those that begin with "
        known += ", ".join(_PREFIX + one for one in _GROUPS)
        hint = f"did you mean {_PREFIX}{similar[0]}?" if similar else f"unset it; the variables are {known}"
        sentences.append(f"{variable} is an unknown variable, which has no effect: {hint}")
    return sentences
