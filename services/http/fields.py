"""Types of fields that requests share. Values are checked strictly when they are read, and do not change."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

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


class Strict(BaseModel):
    """An object without fields that are unknown or of another type. Null is the same as leaving a field out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
