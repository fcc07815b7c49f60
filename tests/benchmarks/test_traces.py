"""Compares what `benchmarks.traces` records with transformers, and tests how the laboratory replays it."""

from contextlib import closing
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.recorded import Pair, Text, read, write
from benchmarks.simulate import PAIRS, VIRTUAL, lockstep_ms, row, traced
from benchmarks.traces import rights, trace, written
from bridge.generation import Delta, generate
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from services.engines.torch.engine import TorchEngine
from services.model.host import LoadedModel, load
from services.model.target.session import TargetSession
from tests.support.engine_contract import expected


def _load(directory: Path) -> LoadedModel:
    return load(directory, directory.name, lambda: TorchEngine(directory, dtype="float32", threads=1, slot_count=1))


async def test_a_draft_is_right_where_it_would_have_said_the_same(tiny_models: tuple[Path, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[1], dtype="float32")
    ids, right, confidence = [5, 6, 7], "", []
    for place in range(80):
        logits = torch.from_numpy(expected(reference, ids)[-1])
        best = int(logits.argmax())
        knows = place % 5 in (0, 1, 3)
        ids.append(best if knows else (best + 1) % 100)
        right += str(int(knows))
        confidence.append(float(logits.softmax(dim=0).max()))
    draft = _load(tiny_models[1])
    found = await rights(draft, ids, 3)
    assert found[0] == right
    assert found[1] == pytest.approx(confidence, rel=1e-3)
    draft.scheduler.close()


async def test_a_trace_is_of_the_drafts_tokens_of_what_the_target_says(tiny_models: tuple[Path, Path]) -> None:
    """The draft's tokens are single bytes, so that they can be compared with the bytes that the bridge sends."""
    target, draft = (_load(directory) for directory in tiny_models)
    prompt = "The quick brown fox"
    request = Request(prompt, max_tokens=20, speculation=SpeculationParameters(Mode.OFF))
    with closing(TargetSession(target.model, target.scheduler, target.sampler(SamplingParameters(), 0))) as verifier:
        streamed = "".join(
            [event.text async for event in generate(request, target.model, verifier) if isinstance(event, Delta)]
        )
    data, token_count = await written(target, prompt, 20)
    assert data.decode(errors="replace") == streamed
    assert token_count == 20
    vocabulary = draft.model.vocabulary
    whole, before = (vocabulary.pieces(text, whole=True).ids for text in (prompt.encode() + data, prompt.encode()))
    count = len(whole) - next(n for n, (a, b) in enumerate(zip_longest(whole, before)) if a != b)
    found = await trace(target, draft, prompt, data)
    assert len(streamed) > 10
    assert found[0] == (await rights(draft, whole, 1))[0][-count:]
    assert len(found[0]) == len(found[1]) == count
    for model in (target, draft):
        model.scheduler.close()


def test_a_file_holds_several_pairs(tmp_path: Path) -> None:
    one = Pair("big", "small", (Text("qa", "110", (1.0, 0.4, 0.0), 2), Text("chat", "0", (0.2,), 1)))
    other = Pair("big", "tiny", (Text("qa", "01", (0.6, 0.8), 2),))
    write(tmp_path / "traces.json", [one, other], "two of them")
    found = read(tmp_path / "traces.json")
    assert found == {"big <- small": one, "big <- tiny": other}
    assert found["big <- small"].right == "1100"
    assert found["big <- small"].acceptance == 0.5


def test_the_laboratory_is_right_where_the_trace_is() -> None:
    """The trace has runs of right and of wrong tokens; two in three are right."""
    right = ("1" * 8 + "0" * 4) * 10
    pair = traced(PAIRS[0], Pair("big", "small", (Text("", right, (0.5,) * len(right), 60),)))
    assert [pair.is_right(1, place) for place in range(7, 13)] == [True, False, False, False, False, True]
    # A turn of eight that starts at a multiple of twelve is all right; four passes of one token each follow.
    turn, passes = pair.forward_ms(9) + 8 * pair.draft_ms, 3
    assert lockstep_ms(pair, 8, range(12, 24)) * 12 == (passes + 1) * turn
    found = row(replace(pair, round_trip_ms=10, jitter=0.2), 600, VIRTUAL)
    assert found["acceptance"] == 2 / 3
    assert found["auto"] > 0.97 * max(found["lockstep"], found["opportunistic"], 1.0)
    assert found["opportunistic"] > 0.93 * found["simulated_opportunistic"]
