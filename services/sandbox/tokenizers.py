"""A tokenizer that came from another process, read and tested in a process with limits.

A file that is made to take all the memory, or forever, or to crash the library, ends that process and nothing else.
"""

import asyncio
import contextlib
import json
from typing import Any

from bridge.errors import TokenizerNotUnderstood
from services.sandbox.process import command, environment

# The largest tokenizers in use take 3 s.
TIME_LIMIT_SECONDS = 60


async def flaw_of(tokenizer_json: bytes, time_limit: float = TIME_LIMIT_SECONDS) -> str:
    """Returns what keeps a tokenizer from being a target's; empty if nothing does.

    Raises `TokenizerNotUnderstood` for one that no model can be served with, or that goes beyond the limits.
    """
    process = await asyncio.create_subprocess_exec(
        *command("services.sandbox.tokenizer_selftest", str(TIME_LIMIT_SECONDS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment(),
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(tokenizer_json), time_limit)
    except TimeoutError:
        raise _unusable(f"it took more than {time_limit:g} s to read") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if not said:
        raise _unusable(f"the process that tried it ended with status {process.returncode}")
    answer: dict[str, Any] = json.loads(said)
    if "error" in answer:
        raise TokenizerNotUnderstood(answer["error"], **answer["metadata"])
    return str(answer["flaw"])


def _unusable(what: str) -> TokenizerNotUnderstood:
    return TokenizerNotUnderstood(
        f"the tokenizer goes beyond what a tokenizer may ask for: {what}; serve the model with another tokenizer.json",
        component="file",
    )
