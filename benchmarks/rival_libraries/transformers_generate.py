"""`generate` of transformers."""

import argparse
from importlib.metadata import version
from typing import Any

from benchmarks.rival_libraries.rival import LOOKUP_TOKENS, Answer, Clock, Request, Rival


def transformers(options: argparse.Namespace) -> tuple[str, Rival]:
    """Loads transformers' `generate`: plain, with an assistant of another tokenizer, or with prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)

    def load(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).eval()

    model = load(options.model)
    more: dict[str, Any] = {}
    if options.name == "transformers-assisted":
        if not options.draft:
            raise ValueError("transformers-assisted needs --draft")
        tokenizers = (AutoTokenizer.from_pretrained(path) for path in (options.model, options.draft))
        more = dict(zip(("tokenizer", "assistant_tokenizer"), tokenizers, strict=True))
        more["assistant_model"] = load(options.draft)
    elif options.name == "transformers-prompt-lookup":
        more = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    # A forward returns logits for its candidates and one more token.
    widths: list[int] = []
    model.register_forward_hook(lambda module, args, output: widths.append(output.logits.shape[1]))

    def answer(request: Request) -> Answer:
        widths.clear()
        clock, inputs = Clock(), torch.tensor([request.prompt_ids])
        with torch.inference_mode():
            found = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=request.max_tokens,
                eos_token_id=request.stop_ids or None, pad_token_id=0, streamer=_FirstToken(clock), **more,
            )  # fmt: skip
        ids = found[0, len(request.prompt_ids) :].tolist()
        drafted = (sum(widths) - len(widths), len(ids) - len(widths)) if more else (0, 0)
        return Answer(ids, clock.first_token_ns, clock.elapsed_ns, len(widths), *drafted)

    return f"transformers {version('transformers')}, torch {version('torch')}, {options.dtype}", answer


class _FirstToken:
    """A streamer for transformers, whose first `put` is the prompt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompt_seen = False

    def put(self, _: object) -> None:
        if self._prompt_seen:
            self._clock.tokens()
        self._prompt_seen = True

    def end(self) -> None:
        pass
