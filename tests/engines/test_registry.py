"""Tests the registry of engines: the choice of `auto`, what an engine refuses, and how one is added."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridge.errors import InvalidField, UnusableModel
from draftbridge import Client
from services.cli.processes import fleet
from services.engines import spec as specs
from services.engines.ik_llama import spec as ik_llama
from services.engines.openvino.spec import OPENVINO
from services.engines.registry import choose_engine, engine_spec, engines, prepare
from services.engines.spec import Dtype, EngineOptions, GaudiOptions, Weights
from services.engines.torch import spec as torch_spec
from services.engines.torch.spec import TORCH
from tests.support.engine_package import install_engine

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "engines.md"

# An engine in a separate package: the torch engine under another name, installed by an entry point.
TOY = '''
from dataclasses import replace
from services.engines.torch.spec import TORCH

class Toy:
    """Counts its forwards; everything else is the torch engine's."""
    name = "toy"

    def __init__(self, engine):
        self._engine, self.forward_count = engine, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def forward(self, rows):
        self.forward_count += 1
        return self._engine.forward(rows)

SPEC = replace(TORCH, name="toy", runs="what torch runs", open=lambda path, options: Toy(TORCH.open(path, options)))
'''


def test_an_engine_of_another_package_serves_a_generation(
    tmp_path: Path, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path, "toy", TOY, monkeypatch)
    target, options = str(tiny_models[0]), ("--dtype", "float32", "--threads", "1")
    with (
        fleet(target, None, target_options=("--engine", "toy", *options)) as running,
        Client(running.bridge) as client,
    ):
        served = {model.name: model.engine for model in client.models()}
        assert served[Path(target).name] == "toy"
        assert client.generate("The quick", max_tokens=6).finished.usage.generated_token_count == 6


def test_auto_takes_the_first_installed_engine_that_runs_the_model(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: set[str] = set()
    monkeypatch.setattr(specs, "find_spec", lambda name: None if name in missing else find_spec("json"))
    monkeypatch.setattr("services.engines.openvino.engine.core_count", lambda: 2, raising=False)

    def chosen(model: str, **options: object) -> str:
        return choose_engine("auto", model, replace(EngineOptions(device="cpu"), **options))[0].name

    directory, built_in = str(tiny_models[0]), "gemma-3-270m"
    assert chosen(built_in) == "llamacpp"
    assert chosen(directory) == "openvino"
    assert chosen(built_in, dtype=Dtype.FLOAT32) == "openvino"
    assert chosen(built_in, weights=Weights.INT8) == "openvino"
    assert chosen(built_in, compile=True) == "torch"
    assert chosen(built_in, device="cuda") == "torch"
    assert chosen(built_in, trusted=True) == chosen(directory, trusted=True) == "torch"
    missing |= {"llama_cpp", "nncf"}
    monkeypatch.setattr(ik_llama, "missing_instructions", lambda: "")
    assert chosen(built_in) == "ik_llama"
    monkeypatch.setattr(ik_llama, "missing_instructions", lambda: "avx2")
    assert chosen(built_in) == "torch"


def test_auto_passes_over_openvino_in_a_version_that_it_cannot_use(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = pytest.importorskip("openvino.op", reason="openvino is not installed")
    monkeypatch.setattr(specs, "find_spec", lambda name: find_spec("json"))
    for name in ("engine", "graph"):
        monkeypatch.delitem(sys.modules, f"services.engines.openvino.{name}", raising=False)
    monkeypatch.delattr(operators, "_PagedAttentionExtension")
    assert choose_engine("auto", str(tiny_models[0]), EngineOptions(device="cpu"))[0].name == "torch"
    with pytest.raises(UnusableModel, match=r"in another version .*pip install"):
        OPENVINO.open(tiny_models[0], EngineOptions(device="cpu"))


def test_auto_compares_only_engines_that_support_the_options(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "find_spec", lambda name: find_spec("json"))
    monkeypatch.setattr("services.engines.openvino.engine.core_count", lambda: 2, raising=False)

    def chosen(**options: object) -> str:
        given = replace(EngineOptions(device="cpu"), **options)
        return choose_engine("auto", str(tiny_models[0]), given, lambda rivals, *_: rivals[-1])[0].name

    assert chosen() == "torch", "the last of the rivals"
    assert chosen(weights=Weights.INT4) == "openvino"
    with pytest.raises(InvalidField, match="--weights must be auto, full, int8 or int4 with --engine openvino"):
        chosen(weights=Weights.REPACKED)
    with pytest.raises(InvalidField, match="--weights must be auto, full or int8 with --engine torch"):
        chosen(weights=Weights.INT4, trusted=True)


def test_a_model_that_auto_converts_keeps_its_weights(tiny_models: tuple[Path, Path]) -> None:
    _, options = choose_engine("auto", str(tiny_models[0]), EngineOptions(device="cpu", dtype=Dtype.FLOAT32))
    assert options.weights is Weights.FULL
    _, options = choose_engine("openvino", str(tiny_models[0]), EngineOptions())
    assert options.weights is Weights.AUTO


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "torhc",
            EngineOptions(),
            "--engine must be one of auto, llamacpp, ik_llama, openvino, habana, torch, got 'torhc'",
        ),
        ("torch", EngineOptions(weights=Weights.INT4), "--weights must be auto, full or int8 with --engine torch"),
        ("llamacpp", EngineOptions(dtype=Dtype.FLOAT32), "--dtype must be auto with --engine llamacpp, got float32"),
        ("openvino", EngineOptions(compile=True), "--compile must be left out with --engine openvino"),
        ("llamacpp", EngineOptions(trusted=True), "--trust-model must be left out with --engine llamacpp"),
        ("ik_llama", EngineOptions(trusted=True), "--trust-model must be left out with --engine ik_llama"),
        (
            "torch",
            EngineOptions(gaudi=GaudiOptions(bucket_size=64)),
            "--bucket-size must be left out with --engine torch",
        ),
        (
            "habana",
            EngineOptions(gaudi=GaudiOptions(flash_attention_recompute=True)),
            "--flash-attention-recompute must be left out, or set together with --use-flash-attention",
        ),
    ],
)
def test_options_that_an_engine_does_not_have_are_refused(name: str, options: EngineOptions, words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        choose_engine(name, "gemma-3-270m", options)


def test_an_engine_that_is_not_installed_names_the_command_that_installs_it() -> None:
    absent = replace(engine_spec("llamacpp"), modules=("a_module_that_nobody_has",))
    with pytest.raises(UnusableModel, match=r"pip install -e '\.\[llamacpp\]' in the checkout"):
        absent.check(EngineOptions())


def test_a_model_is_prepared_for_one_engine() -> None:
    with pytest.raises(InvalidField, match="--engine must be one engine"):
        prepare("auto", "gemma-3-270m", EngineOptions(), pytest.fail)


@pytest.mark.parametrize(
    ("dtype", "device", "processor_has", "accelerators", "weights"),
    [
        (Dtype.AUTO, "auto", True, (), "bfloat16"),
        (Dtype.AUTO, "cpu", True, ("/dev/null",), "bfloat16"),
        (Dtype.AUTO, "auto", True, ("/dev/null",), "float32"),
        (Dtype.AUTO, "cuda", True, (), "float32"),
        (Dtype.AUTO, "cpu", False, (), "float32"),
        (Dtype.BFLOAT16, "cpu", False, (), "bfloat16"),
        (Dtype.FLOAT32, "cpu", True, (), "float32"),
        (Dtype.FLOAT16, "cpu", True, (), "float32"),
    ],
)
def test_torch_has_weights_converted_to_bfloat16_if_it_surely_computes_in_that(
    dtype: Dtype,
    device: str,
    processor_has: bool,
    accelerators: tuple[str, ...],
    weights: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has no exact values any more must not serve a forward in float32, such as on a GPU that has no bfloat16."""
    monkeypatch.setattr("services.engines.cpu._ACCELERATORS", accelerators)
    monkeypatch.setattr(torch_spec, "has_bfloat16", lambda: processor_has)
    monkeypatch.setattr(torch_spec, "resolve", lambda model, report, *, weights, trusted: Path(weights))
    options = EngineOptions(dtype=dtype, device=device)
    assert TORCH.prepare("model", options, pytest.fail) == Path(weights)
    assert (torch_spec._dtype(options) is Dtype.BFLOAT16) == (weights == "bfloat16"), "and computes in it"


def test_the_documentation_has_the_table_of_the_registry() -> None:
    """`draftbridge engines --markdown` prints these rows."""
    text = DOCS.read_text()
    for spec in engines().values():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{spec.name}` |"))
        for fact in (spec.runs, spec.devices, spec.install, *spec.dtypes, *spec.weights):
            assert fact in row, (spec.name, fact)
