"""llama.cpp's own server, as a process of its own."""

import argparse
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rival_libraries.rival import Answer, Clock, Request, Rival, end_with_parent, gguf_of


def llama_server(options: argparse.Namespace) -> tuple[str, Rival]:
    """Starts llama.cpp's own server, plain or with a draft of the same tokenizer; see `_speculation`.

    The program is `llama-server` on the PATH, or what LLAMA_SERVER names.
    """
    program = shutil.which(os.environ.get("LLAMA_SERVER", "llama-server"))
    if not program:
        raise ValueError("llama-server is not on the PATH: build llama.cpp, or name the program in LLAMA_SERVER")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(options.threads)
    server = subprocess.Popen(
        [
            program, "--model", gguf_of(options), "--host", "127.0.0.1", "--port", str(port), "--parallel", "1",
            "--threads", threads, "--threads-batch", threads, "--ctx-size", str(options.context),
            *_speculation(options),
        ],
        stdin=subprocess.DEVNULL, preexec_fn=end_with_parent,
    )  # fmt: skip

    def post(path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"llama-server answered {response.status}")
        yield from response
        connection.close()

    until = time.monotonic() + 300
    while True:
        try:
            list(post("/health", None))
            break
        except (OSError, RuntimeError) as error:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("llama-server did not start: see its messages above") from error
            time.sleep(0.2)  # it announces its start nowhere else than in its answer

    def answer(request: Request) -> Answer:
        clock, ids, timings = Clock(), list[int](), dict[str, Any]()
        body = {
            "prompt": request.prompt_ids, "n_predict": request.max_tokens, "temperature": 0, "return_tokens": True,
            "stream": True, "cache_prompt": True,
        }  # fmt: skip
        for line in post("/completion", body):
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                timings = event.get("timings", timings)
                if not event["stop"]:
                    clock.tokens()
                    ids += event["tokens"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        return Answer(ids, clock.first_token_ns, clock.elapsed_ns, len(ids) - accepted, drafted, accepted)

    return f"{Path(program).name}, {Path(gguf_of(options)).name}", answer


def _speculation(options: argparse.Namespace) -> list[str]:
    """Returns llama-server's options for speculative decoding, with its own default number of candidates."""
    if options.name != "llama-server-draft":
        return []
    if not options.draft_gguf:
        raise ValueError("llama-server-draft needs --draft-gguf")
    return ["--spec-type", "draft-simple", "--spec-draft-model", options.draft_gguf]
