"""Measures each engine alone and through its service, and the library that it uses without any of our code.

    python -m benchmarks.engines [--engine torch llamacpp] [--model NAME ...] [--threads 2] [--device cuda]
        [--json FILE]

Prints milliseconds of a forward by width and by number of sequences, milliseconds of reading a prompt, memory of the
service in GiB, and tokens per second of the library alone (`generate` of transformers; decode and argmax of llama.cpp
and OpenVINO), of one session through the service and of eight together. Each speed is the median of 3 rounds, in which
the three take turns.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from draftbridge.v1 import target_pb2, target_pb2_grpc
from services.cli.processes import serve
from services.engines.cpu import core_count
from services.engines.engine import Engine, Row
from services.engines.openvino.spec import convert
from services.store.resolve import resolve, resolve_gguf

# Options of `serve`. Compiling takes minutes.
OPTIONS = {
    "torch": ("--engine", "torch"),
    "torch-compile": ("--engine", "torch", "--compile"),
    "torch-compile-int8": ("--engine", "torch", "--compile", "--weights", "int8"),
    "llamacpp": ("--engine", "llamacpp"),
    "ik_llama": ("--engine", "ik_llama"),
    "openvino": ("--engine", "openvino"),
    "openvino-int4": ("--engine", "openvino", "--weights", "int4"),
    "openvino-full": ("--engine", "openvino", "--weights", "full"),
}
WIDTHS = (1, 2, 4, 8, 16)
SESSIONS = (1, 2, 4, 8, 16)
CONTEXT = 128
PROMPT = 512
TOKENS = 64
ROUNDS = 3


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", default=["torch", "llamacpp"], choices=list(OPTIONS))
    parser.add_argument("--model", nargs="+", default=["smollm2-135m-instruct", "gemma-3-270m"])
    parser.add_argument("--threads", type=int, default=core_count())
    parser.add_argument("--device", default="auto", help="as in the serve command")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # One process each: two libraries that use the same processor registers conflict in one process.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        pairs = [(engine, model) for model in arguments.model for engine in arguments.engine]
        rows = [pool.submit(_measure, *pair, arguments.threads, arguments.device).result() for pair in pairs]
    Console(width=130).print(_table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def _measure(engine_name: str, model: str, threads: int, device: str) -> dict[str, Any]:
    Console(stderr=True).print(f"[dim]{model} on {engine_name}[/]")
    ids = np.random.default_rng(0).integers(1000, 10_000, 1024).tolist()
    row = {"model": model, "engine": engine_name, "threads": threads}
    engine = _engine(engine_name, model, threads, device)
    row["device"] = engine.device
    row |= _forwards(engine, ids)
    if engine_name == "llamacpp":
        alone = _bare_llamacpp(model, threads)
    elif engine_name == "ik_llama" or engine_name.startswith("openvino"):
        alone = _bare_forwards(engine)
    else:
        alone = _bare_torch(model, threads, engine.device)
    speeds: dict[str, list[float]] = {"bare": [], "service_1": [], "service_8": []}
    options = (*OPTIONS[engine_name], "--threads", str(threads), "--device", device, "--role", "target", "--slots", "8")
    with serve(model, *options) as (address, process):
        asyncio.run(_sessions(address, 1, ids))  # the first run is slower and does not count
        for _ in range(ROUNDS):
            speeds["bare"].append(alone(ids[:CONTEXT]))
            speeds["service_1"].append(asyncio.run(_sessions(address, 1, ids)))
            speeds["service_8"].append(asyncio.run(_sessions(address, 8, ids)))
        row["service_gib"] = psutil.Process(process.pid).memory_info().rss / 2**30
    return row | {name: median(found) for name, found in speeds.items()}


def _forwards(engine: Engine, ids: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": engine.dtype}

    def add(name: str, rows: list[Row], repeats: int = 8) -> None:
        found[f"{name}_ms"] = _milliseconds(lambda: engine.forward(rows), repeats)

    add("prompt", [Row(0, 0, tuple(ids[:PROMPT]), PROMPT - 1)], 3)
    for slot in range(engine.slot_count):
        engine.forward([Row(slot, 0, tuple(ids[:CONTEXT]), CONTEXT - 1)])
    for width in WIDTHS:
        add(f"width_{width}", [Row(0, CONTEXT, tuple(ids[CONTEXT : CONTEXT + width]), 0)])
    for count in SESSIONS:
        add(f"sessions_{count}", [Row(slot, CONTEXT, (ids[slot],), 0) for slot in range(count)])
    return found


def _engine(name: str, model: str, threads: int, device: str) -> Engine:
    if name == "llamacpp":
        from services.engines.llamacpp.engine import LlamaCppEngine

        return LlamaCppEngine(resolve_gguf(model), device=device, threads=threads, slot_count=max(SESSIONS))
    if name == "ik_llama":
        from services.engines.ik_llama.engine import IkLlamaEngine

        return IkLlamaEngine(resolve_gguf(model), threads=threads, slot_count=max(SESSIONS))
    if name.startswith("openvino"):
        from services.engines.openvino.engine import OpenVinoEngine

        path = convert(resolve(model), model, name.partition("-")[2] or "int8")
        return OpenVinoEngine(path, device=device, threads=threads, slot_count=max(SESSIONS))
    from services.engines.torch.engine import TorchEngine

    return TorchEngine(
        resolve(model),
        device=device,
        threads=threads,
        slot_count=max(SESSIONS),
        int8=name.endswith("int8"),
        compiled="compile" in name,
    )


def _bare_forwards(engine: Engine) -> Callable[[list[int]], float]:
    """Returns a function for the tokens per second of the forwards of OpenVINO or ik_llama.cpp, and argmax."""

    def run(ids: list[int]) -> float:
        last = int(engine.forward([Row(0, 0, tuple(ids), len(ids) - 1)])[0].argmax())
        started = time.perf_counter()
        for index in range(TOKENS):
            last = int(engine.forward([Row(0, len(ids) + index, (last,), 0)])[0].argmax())
        return TOKENS / (time.perf_counter() - started)

    return run


def _bare_torch(model: str, threads: int, device: str) -> Callable[[list[int]], float]:
    """Returns a function for the tokens per second of transformers' greedy `generate`, without reading the prompt."""
    import torch

    torch.set_num_threads(threads)
    bare = bare_model(model, device)

    def run(ids: list[int]) -> float:
        inputs = torch.tensor([ids], device=device)
        seconds = []
        for count in (1, TOKENS + 1):
            started = time.perf_counter()
            with torch.inference_mode():
                bare.generate(
                    inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                    max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                )  # fmt: skip
            seconds.append(time.perf_counter() - started)
        return TOKENS / (seconds[1] - seconds[0])

    return run


def bare_model(model: str, device: str) -> Any:
    """Returns transformers' own model, in the type that the engine computes in by default on this machine."""
    import torch
    from transformers import AutoModelForCausalLM

    from services.engines.torch.packed import computes_bfloat16

    dtype = torch.bfloat16 if device != "cpu" or computes_bfloat16() else torch.float32
    return AutoModelForCausalLM.from_pretrained(resolve(model), dtype=dtype).to(device).eval()


def _bare_llamacpp(model: str, threads: int) -> Callable[[list[int]], float]:
    """Returns a function for the tokens per second of llama.cpp's decode and argmax, without reading the prompt."""
    import llama_cpp

    from services.engines.llamacpp.engine import model_options

    gguf = resolve_gguf(model)
    weights = llama_cpp.llama_model_load_from_file(str(gguf).encode(), model_options(gguf))
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = 1024
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(weights, options)
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(weights))

    def step(ids: list[int]) -> int:
        data = (llama_cpp.llama_token * len(ids))(*ids)
        llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(data, len(ids)))
        return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (size,)).argmax())

    def run(ids: list[int]) -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        last = step(ids)
        started = time.perf_counter()
        for _ in range(TOKENS):
            last = step([last])
        return TOKENS / (time.perf_counter() - started)

    return run


async def _sessions(address: str, count: int, ids: list[int]) -> float:
    """Returns the tokens per second of `count` greedy sessions together, once all have their first token."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        begun = asyncio.Barrier(count)
        started: list[float] = []

        async def talk(seed: int) -> None:
            call = stub.Verify()
            # No session may stop early.
            opening = target_pb2.VerifyOpen()
            opening.sampling.ignore_eos = True
            await call.write(target_pb2.VerifyRequest(open=opening))
            run = target_pb2.VerifyRun(token_ids=[*ids[:CONTEXT], ids[seed]], credit=1)
            await call.write(target_pb2.VerifyRequest(run=run))
            await call.read()
            await begun.wait()
            started.append(time.perf_counter())
            await call.write(target_pb2.VerifyRequest(grant=target_pb2.VerifyGrant(credit=TOKENS)))
            for _ in range(TOKENS):
                await call.read()
            call.cancel()

        await asyncio.gather(*(talk(seed) for seed in range(count)))
        return count * TOKENS / (time.perf_counter() - min(started))


def _milliseconds(work: Callable[[], object], repeats: int = 8) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return median(times)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("", *(f"{row['model']}\n{row['engine']}, {row['dtype']}" for row in rows), box=box.SIMPLE)

    def add(label: str, of: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(label, *(of(row) for row in rows))

    add("a forward, ms, by width " + "/".join(map(str, WIDTHS)), lambda row: _several(row, "width", WIDTHS))
    add("the same by sequences " + "/".join(map(str, SESSIONS)), lambda row: _several(row, "sessions", SESSIONS))
    add(f"a prompt of {PROMPT}, ms", lambda row: f"{row['prompt_ms']:.0f}")
    add("library alone, tokens/s", lambda row: f"{row['bare']:.1f}")
    add("service, one session", lambda row: f"{row['service_1']:.1f} ({row['service_1'] / row['bare']:.2f}x)")
    add("service, eight sessions", lambda row: f"{row['service_8']:.1f} ({row['service_8'] / row['service_1']:.2f}x)")
    add("service, memory, GiB", lambda row: f"{row['service_gib']:.2f}")
    return table


def _several(row: dict[str, Any], what: str, of: tuple[int, ...]) -> str:
    return " / ".join(f"{row[f'{what}_{one}_ms']:.1f}" for one in of)


if __name__ == "__main__":
    main()
