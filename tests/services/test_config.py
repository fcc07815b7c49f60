"""Tests the precedence of configuration places, and that errors name the place, the key and a remedy."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.config import (
    SECTIONS,
    BridgeServerConfig,
    InvalidConfiguration,
    ModelServerConfig,
    Role,
)
from services.config_reading import check, check_files, load
from services.rpc.keys import Keys
from tests.support import warm


def written(directory: Path, text: str) -> Path:
    path = directory / "draftbridge.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "[serve]\nmodel = 'from-file'\nslots = 2\nqueue = 3\nkv-memory = 0.5\n")
    environment = {"DRAFTBRIDGE_SERVE_SLOTS": "4", "DRAFTBRIDGE_SERVE_QUEUE": "5", "DRAFTBRIDGE_BRIDGE_TARGET": "x:1"}
    loaded = load(ModelServerConfig, {"slots": "6"}, path, environment)
    config = loaded.values
    assert (config.slots, config.queue, config.kv_memory, config.model) == (6, 5, 0.5, "from-file")
    assert config.role is Role.BOTH
    assert loaded.origins["slots"] == "--slots"
    assert loaded.origins["queue"] == "DRAFTBRIDGE_SERVE_QUEUE"
    assert loaded.origins["kv_memory"] == f"{path}, line 5: [serve] kv-memory"
    assert loaded.origins["role"] == "default"
    with pytest.raises(ValueError, match="frozen"):
        config.slots = 1


def test_the_environment_names_the_file_and_lists_have_commas(tmp_path: Path) -> None:
    path = written(tmp_path, "[bridge]\ntarget = ['a:1']\n")
    environment = {"DRAFTBRIDGE_CONFIG": str(path), "DRAFTBRIDGE_BRIDGE_DRAFT": "b:2, c:3"}
    config = load(BridgeServerConfig, {}, None, environment).values
    assert (config.target, config.draft) == (("a:1",), ("b:2", "c:3"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[bridge]\nworkers = true\n", r"line 2: \[bridge\] workers must be a number, not true or false, got True"),
        ("[serve]\nmodel = 'm'\nslots = 0\n", r"line 3: \[serve\] slots must be greater than or equal to 1, got 0"),
        ("[serve]\nmodel = 'm'\nrole = 'x'\n", r"line 3: \[serve\] role must be 'draft', 'target' or 'both', got 'x'"),
        ("[serve]\nmodle = 'm'\n", r"line 2: \[serve\] modle: unknown setting: did you mean model\?"),
        ("[bridge]\ntarget = 'a:1'\n", r"line 2: \[bridge\] target must be a list, as \['a:1'\], got 'a:1'"),
        ("\n[briddge]\n", r"line 2: \[briddge\]: unknown table: use \[serve\] or \[bridge\]"),
        ("\nslots = 3\n", r"line 2: slots is outside any table: put it under \[serve\] or \[bridge\]"),
        ("\nbridge.max-requests = 0\n", r"line 2: \[bridge\] max-requests must be greater than or equal to 1, got 0"),
        ("\nbridge = {max-requests = 0}\n", r"line 2: \[bridge\] max-requests must be"),
        ("[bridge]\ntarget.x = 1\n", r"line 2: \[bridge\] target must be a list, got"),
        ("[bridge]\ntarget = ['gpu-1']\n", r"line 2: \[bridge\] target must be HOST:PORT .*got 'gpu-1'"),
        ("[bridge]\nlisten = 'nowhere'\n", r"line 2: \[bridge\] listen must be HOST:PORT .*got 'nowhere'"),
        ("[bridge]\nlisten = ''\n", r"line 2: \[bridge\] listen must be HOST:PORT"),
        ("[bridge]\nmetrics = 'x:99999'\n", r"line 2: \[bridge\] metrics must be HOST:PORT .* 0 to 65535"),
        ("[bridge]\ntarget = ['http://a:1']\n", r"line 2: \[bridge\] target must be HOST:PORT"),
        ("[bridge]\ntarget = ['::1:50051']\n", r"line 2: \[bridge\] target must be HOST:PORT .* in brackets"),
        ("[bridge]\notlp = 'collector:4317'\n", r"line 2: \[bridge\] otlp must be http://HOST:PORT"),
        ("[bridge]\notlp = 'http://collector'\n", r"line 2: \[bridge\] otlp must be HOST:PORT"),
        ("[bridge]\nhttp-origin = ['example.com']\n", r"line 2: \[bridge\] http-origin must be scheme, host and port"),
        ("[bridge]\nhttp-host = ['http://example.com']\n", r"line 2: \[bridge\] http-host must be names such as"),
        ('[serve]\nname = "a\\nb"\n', r"line 2: \[serve\] name must be at most 256 printable"),
        ("[serve]\nqqq = 1\n", r"line 2: \[serve\] qqq: unknown setting: the settings are tls-certificate, tls-key"),
        ("[bridge]\nguest-idle = 1e300\n", r"line 2: \[bridge\] guest-idle must be less than or equal to 1000000"),
        ("[bridge]\nconnect-timeout = 1e10\n", r"line 2: \[bridge\] connect-timeout must be less than .* 86400"),
        ("[bridge]\nguest-idle = inf\n", r"line 2: \[bridge\] guest-idle must be a finite number"),
        ("[serve]\nengine = 'nonsense'\n", r"line 2: \[serve\] engine must be one of auto, .*torch, got 'nonsense'"),
        ("[serve]\ncpu-affinity = 'zz'\n", r"line 2: \[serve\] cpu-affinity must be numbers of cores as 0-7,16"),
        ("[serve]\ncpu-affinity = '0 1'\n", r"line 2: \[serve\] cpu-affinity must be numbers of cores as 0-7,16"),
        ("[serve]\ncpu-affinity = '0 - 1'\n", r"line 2: \[serve\] cpu-affinity must be numbers of cores as 0-7,16"),
        (
            "[bridge]\nmax-requests = 3\nmax_requests = 4\n",
            r"line 3: \[bridge\] max_requests: given twice: keep this or .*line 2",
        ),
        ("[serve\n", "is not valid TOML"),
    ],
)
def test_an_error_names_file_line_key_and_remedy(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidConfiguration, match=words) as caught:
        check(path)
    assert str(path) in str(caught.value)


def test_a_process_does_not_start_with_a_misspelt_table(tmp_path: Path) -> None:
    path = written(tmp_path, "[brigde]\nkeys = 'keys.toml'\n")
    with pytest.raises(InvalidConfiguration, match=r"line 1: \[brigde\]: unknown table: use \[serve\] or \[bridge\]"):
        load(BridgeServerConfig, {}, path, {})
    with pytest.raises(InvalidConfiguration, match=r"\[brigde\]: unknown table"):
        load(BridgeServerConfig, {}, None, {"DRAFTBRIDGE_CONFIG": str(path)})


@pytest.mark.parametrize("address", ["\udcff:1", "unix:\udcff"])
def test_an_address_is_utf_8(address: str) -> None:
    with pytest.raises(InvalidConfiguration, match=r"^--target must be .*, got '.*udcff"):
        load(BridgeServerConfig, {"target": (address,)}, None, {})


def test_all_errors_are_told_at_once_and_what_is_missing_with_three_ways_to_give_it() -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        load(ModelServerConfig, {"threads": "many", "queue": "-1"}, None, {})
    text = str(caught.value)
    assert "--threads must be a valid integer" in text and "--queue must be greater than or equal to 0" in text
    assert "MODEL is missing: give it on the command line, as DRAFTBRIDGE_SERVE_MODEL or as model under [serve]" in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("engine", "llamacpp"), ("threads", "4"), ("kv_memory", "4"), ("queue", "1"), ("device", "cuda")),
        *(("compile", True), ("deterministic", True), ("trust_model", True), ("use_flash_attention", True)),
        ("weights", "int4"),
    ],
)
def test_prompt_lookup_ignores_settings_of_engines_unless_the_command_line_has_them(
    field: str, value: str | bool, tmp_path: Path
) -> None:
    """The environment and the file of `up` are those of its target, too."""
    flags = {"model": "suffix", "role": "draft"}
    load(ModelServerConfig, flags, None, {f"DRAFTBRIDGE_SERVE_{field.upper()}": str(value)})
    file = written(tmp_path, f"[serve]\n{field} = {str(value).lower() if value is True else repr(value)}\n")
    load(ModelServerConfig, flags, file, {})
    option = f"--{field.replace('_', '-')}"
    with pytest.raises(InvalidConfiguration, match=f"^{option} must be left out with suffix, which runs without an"):
        load(ModelServerConfig, flags | {field: value}, None, {})


def test_an_empty_variable_may_be_unset() -> None:
    with pytest.raises(InvalidConfiguration, match=r"DRAFTBRIDGE_SERVE_THREADS must be .*, got '': unset it"):
        load(ModelServerConfig, {"model": "m"}, None, {"DRAFTBRIDGE_SERVE_THREADS": ""})
    with pytest.raises(InvalidConfiguration, match=r"--threads must be .*, got ''$"):
        load(ModelServerConfig, {"model": "m", "threads": ""}, None, {})


def test_a_file_may_leave_out_what_the_command_line_gives(tmp_path: Path) -> None:
    needs = check(written(tmp_path, "[serve]\nslots = 2\n[bridge]\n"))
    assert list(needs) == ["serve", "bridge"] and needs["bridge"] == []
    assert "MODEL is missing: give it on the command line" in needs["serve"][0]
    checked = run("config", "check", str(written(tmp_path, "[serve]\nslots = 4\n")))
    assert checked.returncode == 0 and "[serve] alone does not start a process: MODEL is missing" in checked.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listen = '0.0.0.0:1'\n", r"listen is 0.0.0.0:1, which other machines can reach, so it needs TLS .*--keys"),
        ("http = '0.0.0.0:1'\n", r"http is 0.0.0.0:1, which other machines"),
        ("tls-certificate = 'a.pem'\n", r"tls-certificate needs --tls-key too"),
        ("tls-client-ca = 'a.pem'\n", r"tls-client-ca needs --tls-certificate and --tls-key too"),
        ("service-key = 'a.pem'\n", r"service-key needs --service-certificate too"),
        ("target = ['a:1', 'b:1', 'a:1']\n", r"target has a:1 twice"),
    ],
)
def test_settings_that_contradict_each_other_are_named_by_check_and_refused_at_start(
    tmp_path: Path, text: str, words: str
) -> None:
    path = written(tmp_path, f"[bridge]\n{text}")
    with pytest.raises(InvalidConfiguration, match=rf"{path}, line 2: \[bridge\] {words}"):
        load(BridgeServerConfig, {}, path, {})
    (problem,) = check(path)["bridge"]  # the environment may give what is missing
    assert str(path) in problem


def test_a_file_that_cannot_be_read_is_named_with_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, f"[bridge]\ntls-certificate = '{tmp_path}/none.pem'\npair-memory = '{tmp_path}/new'\n")
    with pytest.raises(InvalidConfiguration, match=r"line 2: .* must be a readable file, got '.*none.pem' \(No such"):
        check_files(load(BridgeServerConfig, {}, path, {}, partial=True))
    checked = run("config", "check", str(path))
    assert checked.returncode == 1 and "none.pem" in checked.stderr
    assert run("config", "check", str(path), "--no-files").returncode == 0


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeff[bridge]\ntarget = ['a:1']\n")
    assert load(BridgeServerConfig, {}, path, {}).values.target == ("a:1",)
    keys = tmp_path / "keys.toml"
    keys.write_text('\ufeff[ann]\ntoken = "a-secret-of-some-length"\n')
    Keys(keys)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="No such file"):
        load(ModelServerConfig, {"model": "m"}, tmp_path / "none.toml", {})


@given(st.text())
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("any") / "any.toml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        check(path)
    except InvalidConfiguration as error:
        assert str(path) in str(error)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return warm.run(*arguments, COLUMNS="200")  # names of options are cut where there is no room


def test_what_show_prints_is_a_file_with_the_same_values(tmp_path: Path) -> None:
    path = written(tmp_path, "[bridge]\ntarget = ['a:1', 'b\"x:2']\nngram-memory = 7\n")
    shown = run("config", "show", "bridge", "--config", str(path))
    assert shown.returncode == 0, shown.stderr
    assert "line 3" in shown.stdout and "default" in shown.stdout
    again = written(tmp_path, shown.stdout)
    assert load(BridgeServerConfig, {}, again, {}).values == load(BridgeServerConfig, {}, path, {}).values
    checked = run("config", "check", str(again))
    assert checked.returncode == 0 and "valid" in checked.stdout


def test_what_show_prints_of_any_text_is_toml(tmp_path: Path) -> None:
    path = written(tmp_path, '[serve]\nmodel = "mödel/\U0001f600\\u007f\\t"\n')
    shown = run("config", "show", "serve", "--config", str(path))
    assert load(ModelServerConfig, {}, written(tmp_path, shown.stdout), {}).values.model == "mödel/\U0001f600\x7f\t"


def test_a_bad_value_ends_a_server_with_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "[bridge]\ntarget = ['a:1']\nconnect-timeout = 'soon'\n")
    done = run("bridge", "--config", str(path))
    assert done.returncode == 1
    assert "line 3: [bridge] connect-timeout must be a valid number" in done.stderr.replace("\n", "")


def test_help_has_every_setting() -> None:
    for section, kind in SECTIONS.items():
        text = run(section, "--help").stdout
        for name in kind.model_fields:
            assert (name.upper() if name == "model" else f"--{name.replace('_', '-')}") in text, name


def test_the_reference_has_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    for section, kind in SECTIONS.items():
        table = text.split(f"## [{section}]")[1].split("\n## ")[0]
        for name, field in kind.model_fields.items():
            row = next(line for line in table.splitlines() if line.startswith(f"| `{name.replace('_', '-')}` |"))
            if isinstance(field.default, int | float) and not isinstance(field.default, bool):
                assert f"| `{field.default}` |" in row, row
