"""Answers of the HTTP door that are not streamed, and those that the end of the server cuts off."""

import asyncio

import httpx2 as httpx
import pytest

from services.cli.processes import Fleet
from tests.services.test_http_limits import door
from tests.support.doors import refused


async def test_requests_without_an_answer_at_the_end_of_the_grace_period_are_503(
    tiny_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Semaphore(0)

    async def hang(*given: object) -> None:
        begun.release()
        await asyncio.Event().wait()

    async with httpx.AsyncClient(timeout=60) as http:
        async with door(tiny_fleet, grace=0) as (url, gateway):
            for name in ("served", "served_target", "segment"):
                monkeypatch.setattr(gateway, name, hang)
            calls = (
                http.get(f"{url}/v1/models"),
                http.post(f"{url}/v1/completions", json={"prompt": "a"}),
                http.post(f"{url}/v1/segmentations", json={"text": "a", "models": ["tiny-target"]}),
            )
            running = [asyncio.create_task(one) for one in calls]
            for _ in running:
                await begun.acquire()
        for answer in await asyncio.gather(*running):
            assert "is stopping" in refused(answer, 503, None) and answer.headers["retry-after"] == "1"
