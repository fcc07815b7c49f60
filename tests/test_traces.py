"""What `benchmarks.traces` records, against transformers, and what the laboratory makes of it."""

import json
from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from transformers import AutoModelForCausalLM

from benchmarks.simulate import PAIRS, VIRTUAL, lockstep_ms, row, traced
from benchmarks.traces import rights, trace
from bridge.generation import Delta, Request, generate
from bridge.policy import Mode, SpeculationParameters
from bridge.sampling import SamplingParameters
from services.engine.torch_engine import TorchEngine
from services.model.host import LoadedModel, load
from services.target.session import TargetSession
from tests.engine_contract import expected


def _load(directory: Path) -> LoadedModel:
    return load(directory, directory.name, lambda: TorchEngine(directory, dtype="float32", threads=1, slot_count=1))


async def test_a_draft_is_right_where_it_would_have_said_the_same(tiny_models: tuple[Path, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[1], dtype="float32")
    ids, right = [5, 6, 7], ""
    for place in range(80):
        best = int(expected(reference, ids)[-1].argmax())
        knows = place % 5 in (0, 1, 3)
        ids.append(best if knows else (best + 1) % 100)
        right += str(int(knows))
    draft = _load(tiny_models[1])
    assert await rights(draft, ids, 3) == right
    draft.scheduler.close()


async def test_a_trace_is_of_the_drafts_tokens_of_what_the_target_says(tiny_models: tuple[Path, Path]) -> None:
    """A draft whose tokens are bytes, so that theirs are the bytes of what the bridge sends."""
    target, draft = (_load(directory) for directory in tiny_models)
    prompt = "The quick brown fox"
    request = Request(prompt, max_tokens=20, speculation=SpeculationParameters(Mode.OFF))
    with closing(TargetSession(target.model, target.scheduler, target.sampler(SamplingParameters(), 0))) as verifier:
        said = "".join(
            [event.text async for event in generate(request, target.model, verifier) if isinstance(event, Delta)]
        )
    vocabulary = draft.model.vocabulary
    whole, before = (vocabulary.pieces(text.encode(), whole=True).ids for text in (prompt + said, prompt))
    count = len(whole) - next(n for n, (a, b) in enumerate(zip_longest(whole, before)) if a != b)
    found = await trace(target, draft, prompt, 20)
    assert len(said) > 20
    assert found == (await rights(draft, whole, 1))[-count:]
    assert len(found) == count
    for model in (target, draft):
        model.scheduler.close()


def test_the_laboratory_is_right_where_the_trace_is(tmp_path: Path) -> None:
    """Runs of right ones and of wrong ones, in a trace of two in three."""
    right = ("1" * 8 + "0" * 4) * 10
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"right": right}))
    pair = traced(PAIRS[0], path)
    assert [pair.is_right(1, place) for place in range(7, 13)] == [True, False, False, False, False, True]
    # A turn of eight from a multiple of twelve on is all right, then follow four passes of one token each.
    turn, passes = pair.forward_ms(9) + 8 * pair.draft_ms, 3
    assert lockstep_ms(pair, 8, range(12, 24)) * 12 == (passes + 1) * turn
    found = row(replace(pair, round_trip_ms=10, jitter=0.2), 600, VIRTUAL)
    assert found["acceptance"] == 2 / 3
    assert found["auto"] > 0.97 * max(found["lockstep"], found["opportunistic"], 1.0)
    assert found["opportunistic"] > 0.93 * found["simulated_opportunistic"]
