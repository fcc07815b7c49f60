"""`LLMPipeline` of OpenVINO GenAI."""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.rival_libraries.rival import LOOKUP_NGRAM, LOOKUP_TOKENS, Answer, Clock, Request, Rival, gguf_of


def openvino_genai(options: argparse.Namespace) -> tuple[str, Rival]:
    """Loads `LLMPipeline`, plain or with prompt lookup, from an exported model or a GGUF file."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    exported = (Path(options.model) / "openvino_model.xml").is_file()
    path = options.model if exported else gguf_of(options)
    lookup = options.name.endswith("lookup")
    pipeline = genai.LLMPipeline(path, "CPU", prompt_lookup=lookup, INFERENCE_NUM_THREADS=options.threads)

    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.clock = clock

        def write(self, _: object) -> Any:
            self.clock.tokens()
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def answer(request: Request) -> Answer:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.stop_token_ids = set(request.stop_ids)
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
        clock = Clock()
        found = pipeline.generate(openvino.Tensor(np.array([request.prompt_ids])), config, Streamer(clock))
        return Answer(list(found.tokens[0]), clock.first_token_ns, clock.elapsed_ns)

    return f"openvino-genai {version('openvino-genai')}, {Path(path).name}", answer
