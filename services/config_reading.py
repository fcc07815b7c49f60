"""Reads the configuration of a process from the command line, the environment and a file.

The first of these that sets a value wins: the command line (`--kv-memory 4`), the environment
(`DRAFTBRIDGE_SERVE_KV_MEMORY=4`), the file (`[serve]`, `kv-memory = 4`), the default. The file is TOML with a table for
each kind of process; `--config` or `DRAFTBRIDGE_CONFIG` names it. Lists in the environment are separated by commas.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from services.config import SECTIONS, Configuration, InvalidConfiguration, option

# Files that the process itself creates.
_WRITTEN = ("pair_memory",)
C = TypeVar("C", bound=Configuration)


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A configuration, and for each field the place that its value came from."""

    values: C
    origins: dict[str, str]


def load(
    kind: type[C],
    flags: Mapping[str, Any],
    path: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    partial: bool = False,
) -> Loaded[C]:
    """Reads the configuration of one kind of process. `flags` holds the command line's values by field name.

    With `partial`, other places may add to it: a missing required value, which the result lacks, and settings that are
    not valid together are not errors. Raises `InvalidConfiguration`.
    """
    section = next(name for name, one in SECTIONS.items() if one is kind)
    path = path or (Path(environment["DRAFTBRIDGE_CONFIG"]) if environment.get("DRAFTBRIDGE_CONFIG") else None)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(kind.model_fields, "default")
    if path:
        tables, text = _read(path)
        for key, value in tables.get(section, {}).items():
            place = f"{path}, {line_of(text, section, key)}[{section}] {key}"
            name = _field(kind, key.replace("-", "_"), place)
            if name in values:
                raise InvalidConfiguration(f"{place}: given twice: keep this or {origins[name]}")
            values[name], origins[name] = value, place
    prefix = f"DRAFTBRIDGE_{section.upper()}_"
    for key, value in environment.items():
        if key.startswith(prefix):
            name = _field(kind, key.removeprefix(prefix).lower(), key)
            many = "tuple" in str(kind.model_fields[name].annotation)
            values[name], origins[name] = value.replace(",", " ").split() if many else value, key
    for name, value in flags.items():
        values[name], origins[name] = value, option(name)
    # Conflicts are looked for even if a required value is missing.
    absent = [name for name, field in kind.model_fields.items() if field.is_required() and name not in values]
    try:
        config = kind.model_validate(values | (dict.fromkeys(absent, "") if partial else {}))
    except ValidationError as error:
        text = "; ".join(_explain(section, one, origins) for one in error.errors())
        raise InvalidConfiguration(text) from None
    if partial:
        given = {name: value for name, value in config if name not in absent}
        return Loaded(kind.model_construct(**given), origins)
    unused = (one for one in config.unused() if one[0] in flags)
    problems = [f"{_place(field, origins)} {problem}" for field, problem in (*config.conflicts(), *unused)]
    if problems:
        raise InvalidConfiguration("; ".join(problems))
    return Loaded(config, origins)


def check(path: Path) -> dict[str, list[str]]:
    """Returns what each table of a file still needs from the command line or the environment.

    Raises `InvalidConfiguration` for an unknown table or key, or an invalid value.
    """
    tables, _ = _read(path)
    needs: dict[str, list[str]] = {}
    for section in tables:
        kind = SECTIONS[section]
        load(kind, {}, path, {}, partial=True)
        try:
            load(kind, {}, path, {})
            needs[section] = []
        except InvalidConfiguration as error:
            needs[section] = str(error).split("; ")
    return needs


def check_files(loaded: Loaded[C]) -> None:
    """Raises `InvalidConfiguration` if a file that the configuration names cannot be read."""
    problems = []
    for name in type(loaded.values).model_fields:
        file = getattr(loaded.values, name, None)  # a partial configuration lacks required values
        if isinstance(file, Path) and name not in _WRITTEN:
            try:
                file.open("rb").close()
            except OSError as error:
                place = _place(name, loaded.origins)
                problems.append(f"{place} must be a readable file, got {str(file)!r} ({error.strerror})")
    if problems:
        raise InvalidConfiguration("; ".join(problems))


def _place(field: str, origins: Mapping[str, str]) -> str:
    return option(field) if origins[field] == "default" else origins[field]


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows put a mark in front
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        what = "is not valid TOML" if isinstance(error, tomllib.TOMLDecodeError) else "cannot be read"
        remedy = "correct it" if isinstance(error, tomllib.TOMLDecodeError) else "give the path of a TOML file"
        raise InvalidConfiguration(f"{path} {what} ({reason}): {remedy}") from None
    for section, table in tables.items():
        if not isinstance(table, dict):
            place = f"{path}, {line_of(text, section)}{section}"
            raise InvalidConfiguration(f"{place} is outside any table: put it under {_headers()}")
        if section not in SECTIONS:
            place = f"{path}, {line_of(text, section)}[{section}]"
            raise InvalidConfiguration(f"{place}: unknown table: use {_headers()}")
    return tables, text


def _headers() -> str:
    return " or ".join(f"[{section}]" for section in SECTIONS)


def line_of(text: str, section: str, key: str = "") -> str:
    """Returns "line N: " for a key or a table of a file, because the TOML library does not keep positions.

    Of a key that is not found, as in an inline table, the line of its table.
    """
    wanted = f"{section}.{key}" if key else section
    current, outermost = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+([^\]=]+)\]", line)
        assignment = re.match(r"\s*([\w\s.\"'-]+?)\s*=", line)
        if header:
            path = current = _dotted(header[1])
        elif assignment:
            path = ".".join(filter(None, (current, _dotted(assignment[1]))))
        else:
            continue
        if path == wanted or path.startswith(f"{wanted}."):
            return f"line {number}: "
        if path == section:
            outermost = f"line {number}: "
    return outermost


def _dotted(path: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in path.split("."))


def _field(kind: type[Configuration], name: str, place: str) -> str:
    """Returns `name` if it is a field. Raises `InvalidConfiguration` with the most similar name otherwise."""
    if name in kind.model_fields:
        return name
    raise InvalidConfiguration(f"{place}: {unknown(name, kind.model_fields)}")


def unknown(name: str, fields: Iterable[str]) -> str:
    """Returns the problem of a name that no field has, with the most similar field or, without one, all of them."""
    similar = get_close_matches(name, known := list(fields), 1)
    names = ", ".join(one.replace("_", "-") for one in similar or known)
    return f"unknown setting: {f'did you mean {names}?' if similar else f'the settings are {names}'}"


def _explain(section: str, error: Any, origins: Mapping[str, str]) -> str:
    """Formats one pydantic error as the place, what is allowed there, and what it has."""
    name = str(error["loc"][0])
    if error["type"] == "missing":
        key = name.replace("_", "-")
        return (
            f"{option(name)} is missing: give it on the command line, as "
            f"DRAFTBRIDGE_{section.upper()}_{name.upper()} or as {key} under [{section}] in the configuration file"
        )
    empty_variable = error["input"] == "" and origins[name].startswith("DRAFTBRIDGE_")
    remedy = ": unset it, or give it a value" if empty_variable else ""
    return f"{origins[name]} must be {allowed(error)}, got {error['input']!r}{remedy}"


def allowed(error: Any) -> str:
    """Returns what a pydantic error reports as allowed, to follow "must be"."""
    if error["type"] == "tuple_type":  # in TOML a list
        return f"a list, as [{error['input']!r}]" if isinstance(error["input"], str) else "a list"
    return re.sub(r"^(Input|Value|Tuple) should be |^Input should |^Value error, ", "", error["msg"])
