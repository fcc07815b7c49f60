"""A target on "Gaudi" and a draft on a CPU with another tokenizer: two environments, three processes, one text."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import pytest

from draftbridge import Client
from services.cli.processes import launched, serve

ROOT = Path(__file__).parents[2]
STANDIN_FP8 = Path(__file__).parent / "standin_fp8"
# The environment of everything but Gaudi, with another major version of transformers.
OTHER_PYTHON = os.environ.get("DRAFTBRIDGE_OTHER_PYTHON", "")


@pytest.mark.skipif(not OTHER_PYTHON, reason="make test-habana names the other environment's Python")
def test_a_target_on_gaudi_and_a_draft_on_a_cpu(
    tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [OTHER_PYTHON, "-c", "from importlib.metadata import version; print(version('transformers'))"]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert other.split(".")[0] != version("transformers").split(".")[0]
    target, draft = map(str, tiny_models)
    options = ("--dtype", "float32", "--threads", "1", "--slots", "3")
    gaudi = ("--engine", "habana", "--device", "cpu", "--bucket-size", "64")
    with serve(target, "--role", "target", *gaudi, *options) as (target_address, _):
        monkeypatch.setattr(sys, "executable", OTHER_PYTHON)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "protos")]))
        with (
            serve(draft, "--role", "draft", *options) as (draft_address, _),
            # The oracle: the same target in the other environment, on the torch engine.
            serve(target, "--role", "target", *options) as (plain_address, _),
            bridged(target_address, draft_address) as (bridge, _),
            bridged(plain_address) as (plain, _),
            Client(bridge) as client,
            Client(plain) as reference,
        ):
            models = {model.engine: model for model in client.models()}
            assert set(models) == {"habana", "torch"}
            assert models["habana"].tokenizer_sha256 != models["torch"].tokenizer_sha256
            for prompt in ("The quick brown fox", "a, b, a, b, " * 12):
                for temperature in (0.0, 1.0):
                    asked = {"max_tokens": 40, "temperature": temperature, "seed": 3}
                    texts = {
                        mode: client.generate(prompt, speculation=mode, **asked)
                        for mode in ("off", "lockstep", "opportunistic", "auto")
                    }
                    own = reference.generate(prompt, speculation="off", **asked)
                    assert {(one.text, one.token_ids) for one in texts.values()} == {(own.text, own.token_ids)}
                    assert texts["lockstep"].finished.speculation.num_draft_tokens > 0


@pytest.mark.skipif(not OTHER_PYTHON, reason="make test-habana names the other environment's Python")
def test_a_draft_on_gaudi_that_measures_for_fp8(
    tiny_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft proposes for a target in the other environment, and writes what it measured when it is stopped."""
    target, draft = map(str, tiny_models)
    statistics = str(tmp_path / "made" / "measured")
    (tmp_path / "measure.json").write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": statistics}))
    options = ("--dtype", "float32", "--threads", "1", "--slots", "2")
    gaudi = ("--engine", "habana", "--device", "cpu", "--bucket-size", "64", "--no-use-hpu-graphs")
    measuring = ("--quant-config", str(tmp_path / "measure.json"))
    with ExitStack() as stack:
        monkeypatch.setenv("PYTHONPATH", str(STANDIN_FP8), prepend=os.pathsep)
        draft_address, process = stack.enter_context(serve(draft, "--role", "draft", *gaudi, *options, *measuring))
        monkeypatch.setattr(sys, "executable", OTHER_PYTHON)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "protos")]))
        target_address, _ = stack.enter_context(serve(target, "--role", "target", *options))
        bridge, _ = stack.enter_context(bridged(target_address, draft_address))
        client = stack.enter_context(Client(bridge))
        plain, drafted = (client.generate("The quick", max_tokens=30, speculation=mode) for mode in ("off", "lockstep"))
        assert drafted.token_ids == plain.token_ids
        assert drafted.finished.speculation.num_draft_tokens > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert "lm_head" in json.loads(Path(f"{statistics}_0.json").read_text())


def bridged(target: str, draft: str = ""):  # type: ignore[no-untyped-def]
    """Runs a bridge for a target and perhaps a draft."""
    models = ("--target", target, *(("--draft", draft) if draft else ()))
    return launched("bridge", "bridge", *models, "--listen", "127.0.0.1:0", "--until-stdin-closes")
