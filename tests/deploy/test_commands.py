"""Every command line and every setting in the documentation is one that the program accepts."""

import importlib
import re
from pathlib import Path

import pytest

from bridge.errors import DraftBridgeError
from services.config import SECTIONS, InvalidConfiguration
from services.config_reading import check
from tests.deploy.commands import PAGES, ROOT, UsageError, commands, parse

# Names that a page leaves open, with a value that is valid in their place.
PLACEHOLDERS = {"MODEL": "gemma-3-270m", "HOST:PORT": "host:50050"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_documentation_are_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draftbridge.toml").write_text('[serve]\nmodel = "m"\n[bridge]\ntarget = ["a:1"]\n')
    for arguments in filter(None, commands(page.read_text(), "draftbridge")):
        given = [PLACEHOLDERS.get(one, one) for one in arguments]
        for file in [one for one in given if re.fullmatch(r"[\w-]+\.\w+", one)]:  # some options check that it is there
            (tmp_path / file).touch()
        # A process may get what is missing from the environment that the same page sets.
        environment = {"DRAFTBRIDGE_CONFIG": "draftbridge.toml"} if given in (["bridge"], ["serve"]) else {}
        try:
            parse(given, environment)
        except (UsageError, DraftBridgeError) as error:
            text = error.format_message() if isinstance(error, UsageError) else str(error)
            if not _only_named(arguments, text):
                pytest.fail(f"draftbridge {' '.join(arguments)}: {text}")


def _only_named(arguments: list[str], text: str) -> bool:
    """Returns whether a command is mentioned by its name alone, without the arguments that it needs."""
    return not any(one.startswith("-") for one in arguments[1:]) and ("issing" in text)


def test_wrong_commands_are_noticed() -> None:
    text = "Run `draftbridge serve m --kv-memry 2`:\n\n    $ A=1 draftbridge generate x --sped off > file\n"
    assert list(commands(text, "draftbridge")) == [
        ["serve", "m", "--kv-memry", "2"],
        ["generate", "x", "--sped", "off"],
    ]
    for arguments in commands(text, "draftbridge"):
        with pytest.raises(UsageError, match="No such option"):
            parse(arguments)
    with pytest.raises(InvalidConfiguration, match="--kv-memory must be"):
        parse(["serve", "m", "--kv-memory", "much"])
    with pytest.raises(UsageError):
        parse(["sevre"])


def test_settings_of_the_documentation_are_known() -> None:
    files = [*PAGES, *ROOT.glob("deploy/**/*.yaml"), *ROOT.glob("deploy/**/*.Dockerfile")]
    found, pattern = 0, rf"\bDRAFTBRIDGE_({'|'.join(map(str.upper, SECTIONS))})_([A-Z_]*[A-Z])\b"
    for file in files:
        for section, name in re.findall(pattern, file.read_text()):
            assert name.lower() in SECTIONS[section.lower()].model_fields, f"{file}: DRAFTBRIDGE_{section}_{name}"
            found += 1
    assert found > 20


def test_tables_of_the_documentation_are_valid(tmp_path: Path) -> None:
    texts = [
        block
        for page in PAGES
        for block in re.findall(r"^```toml\n(.*?)^```", page.read_text(), flags=re.S | re.M)
        if re.search(rf"^\[({'|'.join(SECTIONS)})\]", block, flags=re.M)
    ]
    assert texts
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        assert check(path)


def test_targets_of_make_exist() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for page in PAGES:
        for arguments in commands(page.read_text(), "make"):
            wanted = {one for one in arguments if re.fullmatch("[a-z-]+", one) and not one.startswith("-")}
            assert wanted <= known, f"{page}: make {' '.join(arguments)}"


def test_options_of_benchmarks_exist() -> None:
    found = 0
    for page in PAGES:
        for module, *arguments in filter(None, (_module(one) for one in commands(page.read_text(), "python"))):
            source = Path(importlib.import_module(module).__file__ or "").read_text()
            for flag in (one.partition("=")[0] for one in arguments if one.startswith("--")):
                assert f'"{flag}"' in source, f"{page}: {module} {flag}"
                found += 1
    assert found > 5


def _module(arguments: list[str]) -> list[str]:
    return arguments[1:] if arguments[:1] == ["-m"] and arguments[1:2] and "benchmarks." in arguments[1] else []
