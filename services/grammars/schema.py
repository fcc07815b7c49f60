"""Refuses, with their place, the parts of a JSON Schema that the library ignores, rounds or cannot finish."""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from time import thread_time
from typing import Any
from urllib.parse import quote, unquote

from services.grammars.patterns import narrowed

_TYPES = frozenset(("null", "boolean", "number", "integer", "string", "array", "object"))
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)  # fmt: skip
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_COUNTS = frozenset(("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"))
# Keywords whose value is a mapping of schemas, a list of schemas, and one schema (or, for `items`, a list).
_MAPPINGS = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_SAME_VALUE = ("anyOf", "oneOf", "allOf")
_CHOICES = frozenset((*_SAME_VALUE, "prefixItems"))
_SINGLE = frozenset(("items", "additionalItems", "additionalProperties"))
_OTHERS = frozenset(("$ref", "const", "enum", "type", "required", "pattern", "format"))
# The types of values, with their names.
_SHAPES: tuple[tuple[frozenset[str], type | tuple[type, ...], str], ...] = (
    (_MAPPINGS, dict, "an object"),
    (_CHOICES | {"required", "enum"}, list, "an array"),
    (_BOUNDS | _COUNTS, (int, float), "a number"),
    (frozenset(("$ref", "pattern", "format")), str, "a string"),
    (frozenset(("type",)), (str, list), "a type"),
)
_ANNOTATIONS = frozenset(
    (
        "$anchor", "$id", "id", "$comment", "title", "description", "default", "readOnly", "writeOnly", "deprecated",
        "examples", "example", "contentMediaType", "contentEncoding", "discriminator", "externalDocs", "xml",
    )
)  # fmt: skip
_KEYWORDS = _BOUNDS | _COUNTS | _MAPPINGS | _CHOICES | _SINGLE | _OTHERS | _ANNOTATIONS
# The library computes with floating-point numbers, which round integers above this.
_MAX_INTEGER = 1 << 53
_TOO_LARGE = "an integer exceeds 2^53, and would be rounded"
# The separators that may be set for the whole text in "x-guidance", and the values that leave it JSON.
_SEPARATORS = {
    "item_separator": re.compile(r"[ \t\r\n]*,[ \t\r\n]*"),
    "key_separator": re.compile(r"[ \t\r\n]*:[ \t\r\n]*"),
}
# What the library leaves out of formats, as patterns: 29 February is in leap years only, and a leap second at few times
# (not generated at all); a host name has at most 253 characters (RFC 1035).
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:(?:0[13-9]|1[0-2])-|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
_COMPLETIONS = {
    "date": f"^{_DATE}",
    "time": f"^{_TIME}",
    "date-time": f"^{_DATE}[0-9]*[Tt]{_TIME}",
    "hostname": "^[!-~]{1,253}$",
}
# Finding the part that the library refuses ends after so much processor time.
_FINDING_SECONDS = 0.3


class UnsupportedPart(ValueError):
    """A part of a schema or a Lark grammar is not supported. The message begins with its place."""


def check_schema(schema: Any, *, embedded: bool = False) -> None:
    """Raises `UnsupportedPart` for a schema that the library would not follow exactly, or could not finish.

    `embedded`: it is a part of a Lark grammar, where nothing may be set for the whole text.
    """
    parts = dict(_parts(schema, "#"))
    if isinstance(schema, dict):
        _check_top(schema, embedded)
    for path, part in parts.items():
        if isinstance(part, dict):
            _check_part(path, part)
            if (pointer := part.get("$ref")) is None:
                continue
            if pointer != "#" and not pointer.startswith("#/"):
                raise UnsupportedPart(f"at {path}/$ref: only #/... is supported: the server does not fetch resources")
            if unquote(pointer) not in parts:
                raise UnsupportedPart(f"at {path}/$ref: there is no schema at {pointer}")
    groups = _groups(parts)
    _check_exclusive_bounds(parts, groups)
    _check_large_values(parts, groups)
    _check_references(parts)


def _check_references(parts: dict[str, Any]) -> None:
    """Refuses a reference from the root, also by way of others, to a schema whose values never end."""
    targets: dict[str, Any] = {}
    waiting = ["#"]
    while waiting:
        for pointer in _pointers(parts[waiting.pop()]):
            if pointer not in targets:
                targets[pointer] = parts[unquote(pointer)]
                waiting.append(unquote(pointer))
    finite: set[str] = set()
    while found := {one for one in targets.keys() - finite if _is_finite(targets[one], finite)}:
        finite |= found
    if endless := sorted(targets.keys() - finite):
        raise UnsupportedPart(f"at {endless[0]}: no text matches it, because each value contains another one")


def refused_part(schema: Any, refusal: Callable[[Any], str]) -> tuple[str, str]:
    """Returns the JSON pointer of the innermost part of a schema that is refused alone, with the reason.

    `refusal` returns the reason for which a schema is refused, "" if it is not. It is asked for some tenths of a
    second; then the part found last contains the innermost one.
    """
    root, parts = _as_definition(schema), dict(_parts(schema, "#"))
    path, reason, end = "#", refusal(schema), thread_time() + _FINDING_SECONDS
    kind, found = _kind(reason), {path}

    def is_refused(paths: list[str]) -> bool:
        # Another reason does not count: a part without values, for instance, may be allowed where it is.
        properties = {one: {"$ref": _moved(one)} for one in paths}
        whole = {"type": "object", "properties": properties, "required": paths, "$defs": {"root": root}}
        return _kind(refusal(whole)) == kind

    while thread_time() < end:
        inner = [one for one in _inner(path, parts) if one not in found]
        while len(inner) > 1 and thread_time() < end:
            first, rest = inner[: len(inner) // 2], inner[len(inner) // 2 :]
            inner = first if is_refused(first) else rest
        own = refusal({"$defs": {"root": root}, "$ref": _moved(inner[0])}) if len(inner) == 1 else ""
        if _kind(own) != kind:
            break
        path, reason = inner[0], own
        found.add(path)
    return path, reason


def check_parts(schema: Any, is_empty: Callable[[Any], bool]) -> None:
    """Raises `UnsupportedPart` for a part whose `minProperties` no object satisfies.

    `is_empty` returns whether no text matches a schema. It is asked for some tenths of a second.
    """
    parts = list(_parts(schema, "#"))
    if not any(isinstance(part, dict) and "minProperties" in part for _, part in parts):
        return  # the library finds other such parts
    root, end = _as_definition(schema), thread_time() + _FINDING_SECONDS
    for path, part in parts:
        if thread_time() >= end:
            break
        if isinstance(part, dict) and is_empty({"$defs": {"root": root}, "$ref": _moved(path)}):
            raise UnsupportedPart(f"at {path}: no text matches it")


def _as_definition(schema: Any) -> Any:
    """Returns the schema with the references that it needs as a definition of another schema: see `_moved`."""
    root = deepcopy(schema)
    for _, part in list(_parts(root, "#")):
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            part["$ref"] = _moved(unquote(part["$ref"]))
    return root


def encode_references(schema: Any) -> None:
    """Changes the references in a schema to URIs in ASCII: the library reads no others."""
    for _, part in list(_parts(schema, "#")):
        if isinstance(part, dict) and "$ref" in part:
            part["$ref"] = _reference(unquote(part["$ref"]))


def complete_formats(schema: Any) -> None:
    """Adds to a schema what the library leaves out of formats."""
    for _, part in list(_parts(schema, "#")):
        if isinstance(part, dict) and (missing := _COMPLETIONS.get(part.get("format", ""))):
            if "pattern" in part:
                part["allOf"] = [*part.get("allOf", []), {"pattern": missing}]
            else:
                part["pattern"] = missing


def narrow_patterns(schema: Any) -> None:
    """Changes the patterns in a schema that the library would not follow. Raises `UnsupportedPart`."""
    parts = [(path, part) for path, part in _parts(schema, "#") if isinstance(part, dict)]
    is_referenced = any("/patternProperties/" in part.get("$ref", "") for _, part in parts)
    for path, part in parts:
        if "pattern" in part:
            part["pattern"] = _narrowed(f"{path}/pattern", part["pattern"])
        if names := part.get("patternProperties"):
            changed = {_narrowed(f"{path}/patternProperties/{_escaped(one)}", one): names[one] for one in names}
            # Names with U+0000 no longer match, and must not become listed ones only.
            is_listed = "\0" in "".join(part.get("properties", ()))
            if changed.keys() != names.keys() and (is_listed or is_referenced or len(changed) < len(names)):
                needs = "needs names in properties without U+0000, and no $ref to its schema"
                raise UnsupportedPart(f'at {path}/patternProperties: a class without " or \\ {needs}')
            part["patternProperties"] = changed


def _narrowed(path: str, pattern: str) -> str:
    try:
        return narrowed(pattern)
    except ValueError as error:
        raise UnsupportedPart(f"at {path}: {error}") from None


def _inner(path: str, parts: dict[str, Any]) -> list[str]:
    """Returns the pointers of the parts directly within a part, those that it requires first, and of its `$ref`."""
    part = parts[path]
    if not isinstance(part, dict):
        return []
    required = {f"{path}/properties/{_escaped(name)}" for name in part.get("required", [])}
    used = {key: value for key, value in part.items() if key not in _DEFINITIONS}
    inner = sorted((one for one, _ in _parts_within(path, used)), key=lambda one: one not in required)
    return inner + ([unquote(part["$ref"])] if "$ref" in part else [])


def _kind(reason: str) -> str:
    """Returns what precedes the details of a reason, such as names."""
    return reason.partition("\n")[0].partition(":")[0]


def _moved(path: str) -> str:
    return _reference(path.replace("#", "#/$defs/root", 1))


def _reference(path: str) -> str:
    return "#" + quote(path[1:], safe="/~$")


def _check_top(schema: dict[str, Any], embedded: bool) -> None:
    """Checks what applies to the whole text."""
    dialect = schema.get("$schema", "http://json-schema.org/")
    if not str(dialect).partition("://")[2].startswith("json-schema.org/"):
        raise UnsupportedPart(f"at #/$schema: Unknown dialect: {dialect}")
    options = schema.get("x-guidance", {})
    if embedded and ("$schema" in schema or options):
        raise UnsupportedPart('at #: "$schema" and "x-guidance" are not supported in a part of a grammar')
    if not isinstance(options, dict):
        raise UnsupportedPart("at #/x-guidance: it is not an object")
    for name, value in options.items():
        if name == "whitespace_flexible" and isinstance(value, bool):
            continue
        if name not in _SEPARATORS or not isinstance(value, str) or not _SEPARATORS[name].fullmatch(value):
            names = ", ".join(("whitespace_flexible", *_SEPARATORS))
            raise UnsupportedPart(f"at #/x-guidance/{name}: only {names} are supported, with values that leave JSON")


def _groups(parts: dict[str, Any]) -> dict[str, str]:
    """Returns a name for each part, by its path. Parts that may apply to the same value have the same one."""
    group = {path: path for path in parts}

    def first(path: str) -> str:
        while group[path] != path:
            group[path] = group[group[path]]
            path = group[path]
        return path

    for path, part in parts.items():
        if isinstance(part, dict):
            same = [f"{path}/{key}/{place}" for key in _SAME_VALUE for place in range(len(part.get(key, [])))]
            for one in (*same, unquote(part["$ref"]) if "$ref" in part else path):
                group[first(one)] = first(path)
    return {path: first(path) for path in parts}


def _check_exclusive_bounds(parts: dict[str, Any], groups: dict[str, str]) -> None:
    """Refuses integers as exclusive bounds of numbers less than 1 from the other bound: the library includes them."""
    found = [(path, part) for path, part in parts.items() if isinstance(part, dict)]
    limits: dict[str, list[tuple[str, float]]] = {}
    for path, part in found:
        for name in _BOUNDS & part.keys():
            limits.setdefault(groups[path], []).append((name, part[name]))
    for path, part in found:
        for key, opposite, sign in (("exclusiveMinimum", "aximum", 1), ("exclusiveMaximum", "inimum", -1)):
            bound = part.get(key)
            if part.get("type") == "integer" or bound is None or bound % 1:
                continue
            if any(name.endswith(opposite) and 0 <= sign * (one - bound) < 1 for name, one in limits[groups[path]]):
                raise UnsupportedPart(f"at {path}/{key}: less than 1 from the other bound, it must be inclusive")


def _check_large_values(parts: dict[str, Any], groups: dict[str, str]) -> None:
    """Refuses values such as 1e20 that are to be integers, which the library computes with 64 bits."""
    integral = {groups[path] for path, part in parts.items() if _is_integer(part)}
    for path, part in parts.items():
        for key in ("const", "enum") if integral and isinstance(part, dict) else ():
            own = [one for one in _list(part.get(key)) if isinstance(one, float) and groups[path] in integral]
            # Of numbers in objects and arrays, it is not known which parts apply to them.
            inner = [one for one in _list(part.get(key)) if isinstance(one, dict | list)]
            if _has_large_number([own, inner], float):
                raise UnsupportedPart(f"at {path}/{key}: {_TOO_LARGE}")


def _is_integer(part: Any) -> bool:
    return isinstance(part, dict) and "integer" in _list(part.get("type"))


def _has_large_number(value: Any, kind: type) -> bool:
    """Returns whether a value is or contains a number of a kind that the library would round."""
    match value:
        case dict():
            return any(_has_large_number(one, kind) for one in value.values())
        case list():
            return any(_has_large_number(one, kind) for one in value)
    return isinstance(value, kind) and abs(value) > _MAX_INTEGER  # type: ignore[arg-type]


def _check_part(path: str, part: dict[str, Any]) -> None:
    for key, value in part.items():
        if path == "#" and key in ("$schema", "x-guidance"):
            continue
        if (key not in _KEYWORDS and (key == "x-guidance" or not key.startswith("x-"))) or (
            key == "$id" and path != "#"
        ):
            raise UnsupportedPart(f'at {path}: the keyword "{key}" is not supported')
        if (key in _BOUNDS | {"const", "enum"} and _has_large_number(value, int)) or (
            key in _BOUNDS and _has_large_number(value, float)
        ):
            raise UnsupportedPart(f"at {path}/{key}: {_TOO_LARGE}")
        for keys, shape, name in _SHAPES:
            if key in keys and (not isinstance(value, shape) or isinstance(value, bool)):
                raise UnsupportedPart(f"at {path}/{key}: it is not {name}")
    if part.get("multipleOf", 1) <= 0:
        raise UnsupportedPart(f"at {path}/multipleOf: it is not above 0")
    if not all(isinstance(name, str) for name in part.get("required", [])):
        raise UnsupportedPart(f"at {path}/required: it contains something else than strings")
    for one in _list(part.get("type", [])):
        if not isinstance(one, str) or one not in _TYPES:
            raise UnsupportedPart(f"at {path}/type: Invalid type: {one}")
    if "format" in part and part["format"] not in _FORMATS:
        raise UnsupportedPart(f"at {path}/format: Unknown format: {part['format']}")
    if "prefixItems" in part and ("additionalItems" in part or isinstance(part.get("items"), list)):
        raise UnsupportedPart(f'at {path}: beside "prefixItems", only "items" with one schema is supported')
    # The library matches patterns against additional names as they are spelled: there, "\u0078" does not match "^x".
    if part.get("patternProperties") and part.get("additionalProperties") is not False:
        raise UnsupportedPart(f"at {path}/patternProperties: it needs additionalProperties false")
    # The library counts keys, and a key that `properties` does not list may come twice.
    listed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if not listed and part.get("minProperties", 0) > max(1, len(set(part.get("required", [])))):
        raise UnsupportedPart(f"at {path}/minProperties: above 1, it needs additionalProperties false")


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields all schemas in a schema with their JSON pointers."""
    yield path, value
    if isinstance(value, dict):
        for inner, nested in _parts_within(path, value):
            yield from _parts(nested, inner)


def _parts_within(path: str, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas directly within a schema with their JSON pointers."""
    for key, nested in part.items():
        if key in _MAPPINGS and isinstance(nested, dict):
            for name, one in nested.items():
                yield f"{path}/{key}/{_escaped(name)}", one
        elif key in _CHOICES | _SINGLE and isinstance(nested, list):
            for index, one in enumerate(nested):
                yield f"{path}/{key}/{index}", one
        elif key in _SINGLE:
            yield f"{path}/{key}", nested


def _pointers(schema: Any) -> Iterator[str]:
    """Yields the references in a schema, without those in its definitions."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        inner = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        for _, nested in _parts_within("#", inner):
            yield from _pointers(nested)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Returns whether a schema is known to have a value that ends: the references in `finite` have one."""

    def ends(one: Any) -> bool:
        return _is_finite(one, finite)

    if not isinstance(schema, dict):
        return True
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    if not all(map(ends, schema.get("allOf", []))):
        return False
    if any(key in schema and not any(map(ends, schema[key])) for key in ("anyOf", "oneOf")):
        return False
    types = set(_list(schema.get("type", "null")))
    if types - {"object", "array"} or "const" in schema or "enum" in schema:
        return True
    if "object" in types and all(ends(schema.get("properties", {}).get(name)) for name in schema.get("required", [])):
        return True
    items, count = schema.get("items"), schema.get("minItems", 0)
    first = schema.get("prefixItems", items if isinstance(items, list) else [])
    return "array" in types and all(map(ends, first[: int(count)])) and (count <= len(first) or ends(items))
