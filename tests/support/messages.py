"""Hypothesis strategies for messages of the contract: valid, extreme, mutated and random ones."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

# Names that requests may refer to, and texts that are special somewhere.
_TEXTS = ["", "tiny-byte_level", "draft", "suffix", "user", "the quick", "\0", "<eos>", "é🎉", "\n" * 9, '{"a": [1.0]}']
_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_FIXED64: 64,
    FieldDescriptor.TYPE_INT32: 31,
    FieldDescriptor.TYPE_INT64: 63,
}
_MAX_DEPTH = 3


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _BITS:
        most = 2 ** _BITS[field.type] - 1
        # Small numbers, ids of the vocabulary and its end, limits of contexts, and what overflows.
        edges = [0, 1, 2, 70, 404, 405, 511, 512, 513, 1024, most // 2, most - 1, most]
        return st.integers(0, 20) | st.sampled_from(edges)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, 3e38, 1e-40, float("inf"), float("-inf"), float("nan")])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.sampled_from([*(one.number for one in field.enum_type.values), 99, -1])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return st.sampled_from(_TEXTS) | st.text(max_size=6)


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Draws a message of a type, any field of which may be set to anything."""
    message = GetMessageClass(descriptor)()
    if not descriptor.fields:
        return message
    for field in draw(st.lists(st.sampled_from(tuple(descriptor.fields)), max_size=5, unique_by=lambda one: one.name)):
        _set(draw, message, field, depth)
    return message


def _set(draw: st.DrawFn, message: Any, field: FieldDescriptor, depth: int) -> None:
    name = field.name
    if field.message_type is None:
        if field.is_repeated:
            getattr(message, name).extend(draw(st.lists(_scalars(field), max_size=6)))
        else:
            setattr(message, name, draw(_scalars(field)))
    elif depth < _MAX_DEPTH and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[one] for one in ("key", "value"))
        for one, other in draw(st.lists(st.tuples(_scalars(key), _scalars(value)), max_size=3)):
            getattr(message, name)[one] = other
    elif depth < _MAX_DEPTH and field.is_repeated:
        for _ in range(draw(st.integers(0, 3))):
            getattr(message, name).append(draw(messages(field.message_type, depth + 1)))
    elif depth < _MAX_DEPTH:
        getattr(message, name).CopyFrom(draw(messages(field.message_type, depth + 1)))


@st.composite
def encoded(draw: st.DrawFn, descriptor: Descriptor, valid: Sequence[Message]) -> bytes:
    """Draws the bytes of a message: one of `valid`, one changed, any message, or nonsense."""
    kind = draw(st.integers(0, 9))
    if kind <= 2:
        return draw(st.sampled_from(valid)).SerializeToString()
    if kind <= 5:
        return draw(messages(descriptor)).SerializeToString()
    if kind <= 7:  # repeated fields and messages are joined, others replaced
        return draw(st.sampled_from(valid)).SerializeToString() + draw(messages(descriptor)).SerializeToString()
    if kind == 8:
        data = bytearray(draw(st.sampled_from(valid)).SerializeToString())
        places = st.integers(0, max(len(data) - 1, 0))
        for place, byte in draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=3)):
            data[place : place + 1] = bytes([byte])
        return bytes(data[: draw(st.none() | places)])
    return draw(st.binary(max_size=24))
