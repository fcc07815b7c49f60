"""Durations are measured with clocks that cannot jump; the wall clock serves what needs a date."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The files that may read the wall clock: when keys and certificates expire, the date in answers, traces, templates and
# records of measurements, the age of files.
DATED = {
    "bridge/text/chat_reading.py",
    "services/rpc/keys.py",
    "services/rpc/security.py",
    "services/http/responses.py",
    "services/http/app.py",
    "services/traces.py",
    "services/sandbox/jinja.py",
    "services/store/cache.py",
    "services/store/gguf.py",
    "services/engines/trial.py",
    "services/engines/ik_llama/probe.py",
    "services/bridge/pair_memory.py",
    "services/cli/zoo/command.py",
}
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def reads(source: str) -> set[str]:
    """Returns the wall clocks that a file reads, also those that it imports by name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node).removeprefix("datetime.datetime.").removeprefix("dt."))
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{one.name}" for one in node.names}
    return found & WALL


def test_only_what_needs_a_date_reads_the_wall_clock() -> None:
    assert reads("import time\nx = time.time()") == {"time.time"}
    assert reads("from time import time") == {"time.time"}
    files = [
        file for package in ("bridge", "services", "protos/draftbridge") for file in (ROOT / package).rglob("*.py")
    ]
    found = {file.relative_to(ROOT).as_posix() for file in files if reads(file.read_text())}
    assert found <= DATED, found - DATED
