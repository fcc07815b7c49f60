"""A tokenizer that came from another process, tried where it can do no harm: in a process with limits.

    python -m services.bridge.quarantine < tokenizer.json

Reads it, makes its byte table and tries the probes; prints one line of JSON. A file that is made to take all
the memory, or for ever, or to crash the library, ends that process and nothing else.
"""

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

from bridge.errors import TokenizerNotUnderstood
from bridge.probes import prove
from bridge.vocabulary import Vocabulary

# The largest tokenizers in use take 3 s and 1.2 GB.
TIME_LIMIT_SECONDS = 60
_MEMORY_LIMIT_BYTES = 6 << 30


async def flaw_of(tokenizer_json: bytes, time_limit: float = TIME_LIMIT_SECONDS) -> str:
    """What keeps a tokenizer from being a target's; empty if nothing.

    Raises `TokenizerNotUnderstood` for one that is of no use at all, or goes beyond the limits.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.bridge.quarantine",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "RAYON_NUM_THREADS": "1"},
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


def _main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    try:
        answer: dict[str, Any] = {"flaw": prove(Vocabulary(sys.stdin.buffer.read()))}
    except TokenizerNotUnderstood as error:
        answer = {"error": str(error), "metadata": error.metadata}
    except BaseException as error:  # whatever it is, it is the tokenizer's doing; the library's panics are no Exception
        said = f"the library fails over this tokenizer ({type(error).__name__}: {error})"
        remedy = "save the model's fast tokenizer again with save_pretrained"
        answer = {"error": f"{said}: {remedy}", "metadata": {"component": "file"}}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
