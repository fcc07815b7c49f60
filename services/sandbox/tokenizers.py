"""Reads and tests a tokenizer from another server in a process with limits.

A hostile file that exhausts memory or time, or crashes the library, ends only that process.
"""

import asyncio
import contextlib
import json
import signal
from typing import Any

from bridge.errors import TokenizerNotUnderstood
from services.child import command
from services.errors import SandboxBusy
from services.sandbox.process import environment

# The largest published tokenizers take 3 s.
CPU_LIMIT_SECONDS = 30.0
# On a busy machine, the process gets its time later.
_WAIT_SECONDS = 60.0


async def find_flaw(tokenizer_json: bytes) -> str:
    """Returns why a target cannot use the tokenizer; empty if it can.

    Raises `TokenizerNotUnderstood` if a draft cannot use it either, or if it exceeds the limits, and `SandboxBusy` if
    the process gets too little processor time, or the system ends it.
    """
    process = await asyncio.create_subprocess_exec(
        *command("services.sandbox.tokenizer_selftest", str(CPU_LIMIT_SECONDS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment(),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(tokenizer_json), _WAIT_SECONDS)
    except TimeoutError:
        raise _busy(f"its process gave no answer within {_WAIT_SECONDS:g} s", "processor time") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == -signal.SIGKILL:  # its own limits end it otherwise
        raise _busy("its process was killed, probably because memory ran out", "memory")
    if process.returncode == -signal.SIGPROF:
        raise _unusable(f"it takes more than {CPU_LIMIT_SECONDS:g} s of processor time to read")
    if not output:
        raise _unusable(f"the process that read it ended with status {process.returncode}")
    answer: dict[str, Any] = json.loads(output)
    if "error" in answer:
        raise TokenizerNotUnderstood(answer["error"], **answer["metadata"])
    return str(answer["flaw"])


def _busy(detail: str, lacking: str) -> SandboxBusy:
    return SandboxBusy(detail, "read the tokenizer", f"or give the bridge more {lacking}")


def _unusable(what: str) -> TokenizerNotUnderstood:
    return TokenizerNotUnderstood(
        f"the tokenizer exceeds the limits for tokenizers: {what}; serve the model with another tokenizer.json",
        component="file",
    )
