"""Types of fields that requests share. Values are checked strictly when they are read, and do not change."""

import math
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field
from pydantic_core import PydanticCustomError

# A value of this depth still fits gRPC's limit of 100 nested messages, three of which hold one level of a `Struct`.
MAX_JSON_DEPTH = 24
MAX_TOKEN_IDS = 1000

T = TypeVar("T")


class _FirstErrorOnly(FailFast):
    """Checks a list up to its first error: a body can hold millions. Hashable, as alternatives of a type have to be."""

    def __hash__(self) -> int:
        return hash(type(self))


def _portable(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the object. Raises an error of pydantic if it is nested too deeply or has a number beyond a double."""
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        if any(not _is_finite(one) for one in level if isinstance(one, int | float)):
            raise PydanticCustomError("json_number", "Input should be made of finite numbers below 1.8e308")
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for values in inner for one in values]
        if not inner:
            return value
    raise PydanticCustomError("json_depth", f"Input should be nested less than {MAX_JSON_DEPTH} levels deep")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond the range of floats
        return False


List = Annotated[tuple[T, ...], _FirstErrorOnly()]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=0, lt=1 << 32)]
# JSON of any form, as schemas and variables of chat templates have it.
JsonObject = Annotated[dict[str, Any], AfterValidator(_portable)]


class Strict(BaseModel):
    """An object without fields that are unknown or of another type. Null is the same as leaving a field out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
