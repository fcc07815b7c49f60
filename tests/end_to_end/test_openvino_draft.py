"""Tests an OpenVINO draft beside a torch target, with another tokenizer, on pinned cores."""

import os
from pathlib import Path

import pytest

from draftbridge import Client
from services.cli.processes import fleet


def test_an_openvino_draft_beside_a_torch_target_keeps_the_text(
    tiny_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is converted when it is served. No mode changes the text."""
    monkeypatch.setenv("DRAFTBRIDGE_CACHE", str(tmp_path))
    target, draft = map(str, tiny_models)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = ("--cpu-affinity", str(cores[-1])) if cores else ("--threads", "1")
    with (
        fleet(
            target,
            draft,
            target_options=("--dtype", "float32", *pinned),
            draft_options=("--engine", "openvino", "--weights", "int8", *pinned),
        ) as running,
        Client(running.bridge) as client,
    ):
        assert {model.engine for model in client.models()} == {"torch", "openvino"}
        for process in (running.processes["target"], running.processes["draft"]) if cores else ():
            assert os.sched_getaffinity(process.pid) == {cores[-1]}
        for temperature in (0.0, 1.0):
            results = [
                client.generate("The quick brown fox", max_tokens=40, temperature=temperature, seed=5, speculation=mode)
                for mode in ("off", "lockstep", "opportunistic", "auto")
            ]
            assert len({(one.text, one.token_ids) for one in results}) == 1
            assert results[1].finished.speculation.num_draft_tokens > 0
