"""Types of fields that requests share. Values are checked strictly when they are read, and do not change."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic_core import ErrorDetails, PydanticCustomError

from bridge.text.json_objects import MAX_DEPTH, check_object

# The bridge receives tools and calls with up to eight levels around such an object.
_MAX_JSON_DEPTH = MAX_DEPTH - 8
MAX_TOKEN_IDS = 1000

T = TypeVar("T")


class _FirstErrorOnly(FailFast):
    """Checks a list up to its first error: a body can hold millions. Hashable, as alternatives of a type have to be."""

    def __hash__(self) -> int:
        return hash(type(self))


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    try:
        check_object(value, _MAX_JSON_DEPTH)
    except ValueError as error:
        raise PydanticCustomError("json_object", f"Input should be a JSON object ({error})") from None
    return value


List = Annotated[tuple[T, ...], _FirstErrorOnly()]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=0, lt=1 << 32)]
# JSON of any form, as schemas and variables of chat templates have it.
JsonObject = Annotated[dict[str, Any], AfterValidator(_checked)]


# What clients add to their objects, and what asks for nothing. It has any form, and goes no further.
Ignored = Annotated[Any, Field(exclude=True)]


class Strict(BaseModel):
    """An object without values of another type. Null is the same as leaving a field out, also an unknown one.

    An unknown field with another value is refused.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    # A literal, because its error differs from that of a known field that must be null: see `is_unknown`.
    __pydantic_extra__: dict[str, Literal[None]] = Field(init=False)


def is_unknown(error: ErrorDetails) -> bool:
    """Returns whether an error is that of an unknown field with a value."""
    return error["type"] == "literal_error" and error["ctx"]["expected"] == "None"
