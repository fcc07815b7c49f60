"""The choices of one HTTP request take turns on a model with fewer slots, and end together."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from bridge.generation import Delta, Finished
from bridge.planning.planner import Mode
from bridge.ports import FinishReason
from bridge.request import Request
from bridge.statistics import Statistics
from services.bridge.backend import Opened
from services.bridge.pairing import Wish
from services.errors import SlotsExhausted
from services.http import generation

FINISHED = Finished(FinishReason.LENGTH, 1, 2, 2, 1, 1, Mode.OFF, Statistics())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_FREEING_SECONDS", 0.0)


class Slots:
    """A model that runs `count` requests at once. A slot that comes free is noticed `late` refusals afterwards.

    `lost`: requests after which a slot goes to somebody else for good.
    """

    def __init__(self, count: int, *, late: int = 0, lost: int = 99) -> None:
        self.free, self._late, self._lost = count, late, lost
        self.asked = self._refusals_left = 0

    async def generate(
        self, request: Request, target_name: str = "", wish: Wish | None = None
    ) -> AsyncGenerator[Opened | Delta | Finished, None]:
        self.asked += 1
        if not self.free or self._refusals_left:
            self._refusals_left = max(self._refusals_left - bool(self.free), 0)
            raise SlotsExhausted(1, 0)
        self.free -= 1
        try:
            yield Opened("m", "", 0, 1)
            for _ in range(2):
                yield Delta("a", (71,))
            yield FINISHED
        finally:
            self._lost -= 1
            self.free += self._lost > 0
            self._refusals_left = self._late


async def ran(model: Slots, count: int) -> Sequence[int]:
    """Returns which of `count` choices each event belongs to."""
    events = generation.generate(model, [Request("a")] * count, "", Wish())  # type: ignore[arg-type]
    async with aclosing(events):
        return [index async for index, _ in events]


@pytest.mark.parametrize(("slots", "late"), [(1, 0), (2, 0), (1, 5), (9, 0)])
async def test_each_choice_runs_once_whatever_the_number_of_slots(slots: int, late: int) -> None:
    model = Slots(slots, late=late)
    indices = await ran(model, 4)
    assert sorted(indices) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert model.free == slots
    if slots == 1:
        assert [indices[place : place + 4] for place in range(0, 16, 4)] == [[index] * 4 for index in range(4)]


@pytest.mark.parametrize("count", [1, 3])
async def test_a_model_that_others_fill_refuses_all_choices_at_once(count: int) -> None:
    model = Slots(0)
    with pytest.raises(SlotsExhausted):
        await ran(model, count)
    assert model.asked == count


async def test_a_slot_that_goes_to_somebody_else_is_not_awaited_for_ever() -> None:
    model = Slots(1, lost=1)
    with pytest.raises(SlotsExhausted):
        await ran(model, 2)
    assert model.asked == 2 + generation._MAX_ATTEMPTS + 1


async def test_a_choice_whose_text_has_begun_is_not_begun_again() -> None:
    class LosingFirst(Slots):
        async def generate(
            self, request: Request, target_name: str = "", wish: Wish | None = None
        ) -> AsyncGenerator[Opened | Delta | Finished, None]:
            is_first = not self.asked
            async for event in super().generate(request):
                yield event
                if is_first and isinstance(event, Delta):
                    raise SlotsExhausted(1, 0)

    model = LosingFirst(2)
    with pytest.raises(SlotsExhausted):
        await ran(model, 2)
    assert model.asked == 2


async def test_choices_have_ended_when_their_client_has_left() -> None:
    model = Slots(3)
    async with aclosing(generation.generate(model, [Request("a")] * 3, "", Wish())) as events:  # type: ignore[arg-type]
        await anext(events)
        assert model.free < 3
    assert model.free == 3
