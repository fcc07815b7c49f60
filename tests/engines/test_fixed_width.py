"""A deterministic target's logits for a text are the same bit for bit, however the text was divided into forwards."""

from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import Delta, generate
from bridge.planning.planner import Mode, SpeculationParameters
from bridge.request import Request
from bridge.sampling.sampler import SamplingParameters
from draftbridge import Client
from services.cli.processes import fleet
from services.engines.engine import Engine, Row
from services.engines.fixed_width import WIDTH, FixedWidthEngine, as_served
from services.engines.torch.engine import TorchEngine
from services.model.draft.session import DraftSession
from services.model.host import load
from services.model.target.session import TargetSession
from tests.conftest import save_tiny_model
from tests.engines.test_engine import FAMILIES
from tests.support.alone import in_order
from tests.support.depth import DEEP, examples
from tests.support.engine_contract import IDS, expected, saved


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2", *(["gemma2", "opt", "gpt_bigcode"] if DEEP else [])])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    saved(FAMILIES[request.param], path)
    return path


def deterministic(engine: Engine) -> Engine:
    """Makes an engine's logits depend on the text alone, as a server with `--deterministic` does."""
    return as_served(engine, True)


@pytest.fixture(
    scope="module", params=[("bfloat16", FixedWidthEngine), ("bfloat16", deterministic), ("float32", deterministic)]
)
def engines(directory: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """Yields two engines of one model: one under test, and one that reads every text from its start."""
    dtype, way = request.param
    yield tuple(way(TorchEngine(directory, dtype=dtype, slot_count=2)) for _ in range(2))


STEPS = st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1), IDS, st.integers(0, 20)), min_size=1, max_size=8)


@settings(max_examples=examples(25))
@given(steps=STEPS)
def test_a_position_has_the_same_logits_to_the_last_bit(engines: tuple[Engine, Engine], steps: list) -> None:
    engine, reader = engines
    held: dict[int, list[int]] = {0: [], 1: []}
    for slot, fraction, ids, start in steps:
        keep = int(fraction * len(held[slot]))
        held[slot] = held[slot][:keep] + ids
        first = min(start, len(ids))
        rows = [Row(slot, keep, tuple(ids), first)]
        if held[1 - slot]:  # what else is in the forward does not matter
            other = held[1 - slot]
            rows.append(Row(1 - slot, len(other) - 1, (other[-1],), 0))
        logits = engine.forward(rows)[0]
        whole = reader.forward([Row(0, 0, tuple(held[slot]), 0)])[0]
        assert logits.tobytes() == whole[keep + first :].tobytes()


@pytest.mark.parametrize("name", ["phimoe", "gpt_oss"] if DEEP else ["phimoe"])
def test_experts_do_not_see_later_tokens(name: str, tmp_path: Path) -> None:
    """What a block's later tokens are decides how many rows the experts of its first tokens get."""
    config = deepcopy(FAMILIES[name])
    config.hidden_size, config.intermediate_size = 256, 512
    saved(config, tmp_path)
    engine, reader = (deterministic(TorchEngine(tmp_path, dtype="float32", slot_count=2)) for _ in range(2))
    ids = [int(id_) for id_ in np.random.default_rng(0).integers(0, 120, 60)]
    whole = reader.forward([Row(0, 0, tuple(ids), 0)])[0]
    for at in range(0, 60, 4):
        wrong = [119 - id_ for id_ in ids[at + 4 : at + 8]]
        found = engine.forward([Row(1, at, (*ids[at : at + 4], *wrong), 0)])[0][:4]
        assert found.tobytes() == whole[at : at + 4].tobytes()


def test_the_same_engine_without_it_differs_by_how_a_text_came_in(tmp_path: Path) -> None:
    """Shows that the test above can fail."""
    saved(FAMILIES["llama"], tmp_path)
    engine = TorchEngine(tmp_path, dtype="bfloat16", slot_count=2)
    ids = [int(id_) for id_ in np.random.default_rng(0).integers(0, 120, 60)]
    whole = engine.forward([Row(0, 0, tuple(ids), 0)])[0].copy()
    single = np.concatenate([engine.forward([Row(1, at, (id_,), 0)])[0].copy() for at, id_ in enumerate(ids)])
    assert not np.array_equal(whole, single)
    assert np.abs(whole - single).max() < engine.logit_tolerance


def test_its_logits_are_the_models_own(tmp_path: Path) -> None:
    model = saved(FAMILIES["mistral"], tmp_path)
    engine = FixedWidthEngine(TorchEngine(tmp_path, dtype="float32", slot_count=1))
    ids = [int(id_) for id_ in np.random.default_rng(1).integers(0, 120, 3 * WIDTH + 5)]
    logits = engine.forward([Row(0, 0, tuple(ids), 7)])[0]
    np.testing.assert_allclose(logits, expected(model, ids)[7:], atol=1e-4)
    assert engine.forward([Row(0, 10, (3, 4), 2)])[0].shape == (0, engine.vocabulary_size)
    assert engine.context_length % WIDTH == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_deterministic_target_in_bfloat16_says_the_same_in_every_mode(
    tmp_path: Path, temperature: float
) -> None:
    target_path = save_tiny_model(tmp_path / "target", "sentencepiece", 0)
    draft_path = save_tiny_model(tmp_path / "draft", "byte_level", 1)
    target = load(target_path, "target", lambda: FixedWidthEngine(TorchEngine(target_path, dtype="bfloat16")))
    draft = load(draft_path, "draft", lambda: TorchEngine(draft_path, dtype="bfloat16"))
    parameters = SamplingParameters(temperature=temperature)
    texts = set()
    for mode in (Mode.OFF, Mode.LOCKSTEP, Mode.OPPORTUNISTIC):
        speculation = SpeculationParameters(mode, num_assistant_tokens=7)
        request = Request(
            "The quick brown fox", sampling=parameters, seed=4, max_tokens=90 if DEEP else 40, speculation=speculation
        )
        with (
            closing(TargetSession(target.model, target.scheduler, target.sampler(parameters, 4))) as verifier,
            closing(DraftSession(draft.model, draft.scheduler, draft.sampler(parameters, 4))) as drafter,
        ):
            drafts = in_order((draft.model, drafter))
            events = [event async for event in generate(request, target.model, verifier, drafts)]
        texts.add(tuple(id_ for event in events if isinstance(event, Delta) for id_ in event.token_ids))
        assert events[-1].statistics.near_ties == 0  # type: ignore[union-attr]
    assert len(texts) == 1


def test_the_option_reaches_the_service_and_what_it_says_of_itself(tiny_models: tuple[Path, Path]) -> None:
    target, draft = (str(path) for path in tiny_models)
    options = ("--dtype", "bfloat16", "--threads", "1")
    with (
        fleet(target, draft, target_options=(*options, "--deterministic"), draft_options=options) as running,
        Client(running.bridge) as client,
    ):
        assert {model.name: model.deterministic for model in client.models()} == {
            "tiny-target": True,
            "tiny-draft": False,
        }
        results = [
            client.generate("The quick", max_tokens=60, temperature=1.0, seed=1, speculation=mode)
            for mode in ("off", "lockstep", "opportunistic")
        ]
    assert len({result.token_ids for result in results}) == 1
    assert {result.finished.speculation.near_ties for result in results} == {0}


async def test_near_ties_are_counted(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "byte_level", 1)
    loaded = load(path, "model", lambda: TorchEngine(path, dtype="bfloat16"))
    parameters = SamplingParameters()
    request = Request("The quick brown fox", max_tokens=60)
    with closing(TargetSession(loaded.model, loaded.scheduler, loaded.sampler(parameters, 0))) as verifier:
        events = [event async for event in generate(request, loaded.model, verifier)]
    ids = [id_ for event in events if isinstance(event, Delta) for id_ in event.token_ids]
    prompt = loaded.model.vocabulary.prompt(str(request.input), framed=True).ids
    reader = TorchEngine(path, dtype="bfloat16")
    logits = reader.forward([Row(0, 0, (*prompt, *ids[:-1]), len(prompt) - 1)])[0]
    best = np.sort(logits[:, : loaded.model.vocabulary.size], axis=1)[:, -2:]
    close = int(((best[:, 1] - best[:, 0]) < reader.logit_tolerance).sum())
    assert close > 0
    assert events[-1].statistics.near_ties == pytest.approx(close, abs=max(2, close // 5))  # type: ignore[union-attr]


@pytest.mark.parametrize("wanted", [None, False, True])
def test_whether_logits_depend_on_the_text_alone_is_a_choice(wanted: bool | None, tmp_path: Path) -> None:
    """GPT-2's products are not packed, so that determinism costs a lot."""
    for name, costly in (("llama", False), ("gpt2", True)):
        saved(FAMILIES[name], tmp_path / name)
        engine = TorchEngine(tmp_path / name, dtype="float32", slot_count=2)
        served = as_served(engine, wanted)
        if costly or wanted is False:
            assert isinstance(served, FixedWidthEngine) is (wanted is True)
            assert (served.logit_tolerance == 0.0) is (wanted is True)
        else:
            assert served is engine
