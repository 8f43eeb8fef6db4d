"""Settings: layers, every wrong type, line numbers, and what survives a bad file."""

from __future__ import annotations

import os
import pwd
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.config import loading, toml_lines
from bootseer.config.sections import (
    CheckpointSettings,
    Config,
    DepsSettings,
    ImageSettings,
    JobSettings,
)
from bootseer.errors import NotFoundError, UsageError
from tests.support.paths import ROOT

WRONG = {
    "text": ["1", "1.5", "true", "['a']", "{a = 1}", "2020-01-01"],
    "whole number": ["'1'", "1.5", "true", "[1]", "{a = 1}"],
    "number": ["'1'", "true", "[1]", "{a = 1}"],
    "truth value": ["'true'", "1", "1.5", "[true]", "{a = 1}"],
    "list of texts": ["'a'", "1", "true", "['a', 1]", "[['a']]", "{a = 1}"],
    "command": ["1", "true", "['a', 1]", "{a = 1}", "'unclosed \"quote'"],
}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "bootseer.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def fault(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        loading.load_strictly(write(tmp_path, text), environ or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_nothing_given_is_all_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert loading.load_strictly(None, {}) == Config()
    assert loading.load_tolerantly(None, {}).path is None


def test_every_setting_can_be_given_in_a_file(tmp_path: Path) -> None:
    text = """
    [job]
    events = "/e"
    uid = "u"
    attempt = 2
    log_rules = ["torchrun"]
    phase = "job"
    import_times = true
    [deps]
    enabled = false
    install = ["pip", "install", "-r", "r.txt"]
    key_files = ["r.txt"]
    also = ["/opt/x"]
    exclude = ["*.log"]
    key_env = ["CC"]
    store = "/s"
    cache = "/c"
    wait = "never"
    form = "copy"
    wait_limit_s = 9
    store_timeout_s = 3
    deadline_s = 5
    publish = "inline"
    sign_key = "/k"
    allow_setuid = true
    max_age_days = 0.5
    [checkpoint]
    enabled = false
    url = "hdfs://nn:8020/c"
    to = "/c"
    load = "hadoop fs -get x /c"
    form = "copy"
    allow_other = true
    prefetch = "step-*"
    buffered = true
    cache = "/k"
    memory_mib = 128
    user = "u"
    auth = "token"
    token_file = "/t"
    ca_file = "/ca"
    redirects = "any"
    deadline_s = 6
    [image]
    enabled = false
    traces = "hdfs://nn:8020/t"
    image = "sha256:00"
    workload = "train"
    paths = ["/opt"]
    record = "never"
    window_s = 30
    share = 0.5
    limit_mib = 64
    user = "u"
    auth = "simple"
    token_file = "/t"
    ca_file = "/ca"
    redirects = "same-host"
    """
    given_keys = {
        f"{section}.{key}" for section, table in tomllib.loads(text).items() for key in table
    }
    assert given_keys == {setting.key for setting in loading.list_settings()}
    install = ("pip", "install", "-r", "r.txt")
    assert loading.load_strictly(write(tmp_path, text), {}) == Config(
        JobSettings("/e", "u", 2, ("torchrun",), "job", True),
        DepsSettings(
            enabled=False,
            install=install,
            key_files=("r.txt",),
            also=("/opt/x",),
            exclude=("*.log",),
            key_env=("CC",),
            store="/s",
            cache="/c",
            wait="never",
            form="copy",
            wait_limit_s=9.0,
            store_timeout_s=3.0,
            deadline_s=5.0,
            publish="inline",
            sign_key="/k",
            allow_setuid=True,
            max_age_days=0.5,
        ),
        CheckpointSettings(
            enabled=False,
            url="hdfs://nn:8020/c",
            to="/c",
            load=("hadoop", "fs", "-get", "x", "/c"),
            form="copy",
            allow_other=True,
            buffered=True,
            cache="/k",
            prefetch="step-*",
            memory_mib=128,
            user="u",
            auth="token",
            token_file="/t",
            ca_file="/ca",
            redirects="any",
            deadline_s=6.0,
        ),
        ImageSettings(
            enabled=False,
            traces="hdfs://nn:8020/t",
            image="sha256:00",
            workload="train",
            paths=("/opt",),
            record="never",
            window_s=30.0,
            share=0.5,
            limit_mib=64,
            user="u",
            auth="simple",
            token_file="/t",
            ca_file="/ca",
            redirects="same-host",
        ),
    )


def test_the_examples_settings_are_valid() -> None:
    example = ROOT / "examples" / "train" / "bootseer.toml"
    assert loading.load_strictly(str(example), {}).deps.key_files == ("requirements.txt",)


def test_layers_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "[deps]\nstore = '/file'\ncache = '/file'\nwait = 'never'\n")
    environ = {"BOOTSEER_STORE": "/variable", "BOOTSEER_CACHE": "/variable"}
    deps = loading.load_strictly(path, environ, {"deps.store": "/flag"}).deps
    assert (deps.store, deps.cache, deps.wait, deps.form) == ("/flag", "/variable", "never", "auto")


def test_bootseer_toml_of_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "[job]\nuid = 'here'\n")
    monkeypatch.chdir(tmp_path)
    assert loading.load_strictly(None, {}).job.uid == "here"


def test_every_wrong_type_names_key_file_line_and_the_valid(tmp_path: Path) -> None:
    settings = loading.list_settings()
    wrong = [(setting, value) for setting in settings for value in WRONG[setting.shape]]
    assert len(wrong) > len(settings)
    told_otherwise = {}
    for setting, value in wrong:
        begin = f"{tmp_path}/bootseer.toml, line 4: {setting.key} "
        try:
            loading.load_strictly(
                write(tmp_path, f"\n[{setting.section}]\n# why\n{setting.name} = {value}\n"), {}
            )
            said = "taken"
        except UsageError as error:
            said = str(error) if error.exit_code == 2 else f"exit code {error.exit_code}: {error}"
        if not (said.startswith(begin) and said.endswith(f"; give {setting.expected}")):
            told_otherwise[f"{setting.key} = {value}"] = said
    assert told_otherwise == {}


@pytest.mark.parametrize("value", ["-1", "0.0", "nan"])
def test_a_number_out_of_range(tmp_path: Path, value: str) -> None:
    message = fault(tmp_path, f"deps.deadline_s = {value}")
    assert "line 1: deps.deadline_s is" in message
    assert "at least 0.1" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("job.attempt = 1" + "0" * 400, "job.attempt does not fit into 64 bits"),
        ("job.attempt = -1" + "0" * 400, "job.attempt does not fit into 64 bits"),
        ("deps.deadline_s = 1" + "0" * 400, "deps.deadline_s is out of range"),
        ('deps.install = ["a\\u0000"]', "deps.install has a NUL character"),
        ('deps.install = "a\\u0000"', "deps.install has a NUL character"),
        ('deps.also = ["/a\\u0000"]', "deps.also has a NUL character"),
        ('deps.store = "/a\\u0000"', "deps.store has a NUL character"),
        ("x = " + "1" * 5000, "bootseer.toml cannot be read: Exceeds the limit"),
        ("x = " + "[" * 5000, "bootseer.toml cannot be read: "),
        ("#" * (2 << 20), "bootseer.toml is larger than 1048576 bytes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_that_break_a_reader(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in fault(tmp_path, text)


def test_the_search_for_an_install_command_is_bounded(tmp_path: Path) -> None:
    lines = "".join(f"  'a{number}',\n" for number in range(5000))
    loaded = loading.load_tolerantly(write(tmp_path, f"[deps]\ninstall = [\n{lines}]\n[job\n"), {})
    assert loaded.config == Config()
    lines = "".join(f"  'a{number}',\n" for number in range(200))
    loaded = loading.load_tolerantly(write(tmp_path, f"[deps]\ninstall = [\n{lines}]\n[job\n"), {})
    assert len(loaded.config.deps.install) == 200


def test_a_wrong_choice_names_the_choices(tmp_path: Path) -> None:
    message = fault(tmp_path, "[deps]\nwait = 'allways'\n")
    assert "line 2: deps.wait is 'allways' (did you mean 'always'?)" in message
    assert "give one of auto, always, never" in message


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("[deps]\nstor = 1\n", 2, "unknown key 'deps.stor' (did you mean 'store'?)"),
        ("\n\ndeps.stor = 1\n", 3, "unknown key 'deps.stor'"),
        ("x = '''\n[deps]\n'''\n", 1, "unknown key 'x'"),
        ("[job]\n[deps]\nkey_files = [\n 'a',\n]\n'stor' = 1\n", 6, "unknown key 'deps.stor'"),
        ("deps = { cache = '/c', stor = 1 }\n", 1, "unknown key 'deps.stor'"),
        ("\n[dep]\nstore = '/s'\n", 2, "unknown section 'dep' (did you mean 'deps'?)"),
        ("[[deps]]\nstore = '/s'\n", 1, "deps is an array, but must be a table: [deps]"),
        ("\ndeps = 3\n", 2, "deps is a whole number, but must be a table"),
        ("[job]\nuid.x = 1\n", 2, "job.uid is a table"),
        ("[job]\n[job.uid]\nx = 1\n", 2, "job.uid is a table"),
        ("[job]\nuid = 'a'\nuid = 'b'\n", 3, "not valid TOML"),
        ("[job\n", 1, "not valid TOML"),
        ("[job]\nuid = [\n'a'\n", 4, "not valid TOML"),
    ],
)
def test_faults_name_their_line(tmp_path: Path, text: str, line: int, expected: str) -> None:
    message = fault(tmp_path, text)
    assert f"bootseer.toml, line {line}" in message
    assert expected in message


def test_several_faults_are_counted(tmp_path: Path) -> None:
    assert fault(tmp_path, "[job]\na = 1\nb = 2\n[deps]\nc = 3\n").endswith("(and 2 more)")


def test_text_that_is_not_utf8_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bootseer.toml"
    path.write_bytes(b"[job]\nuid = '\xff'\n")
    with pytest.raises(UsageError, match="line 2: not UTF-8"):
        loading.load_strictly(str(path), {})


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no\.toml"):
        loading.load_strictly(str(tmp_path / "no.toml"), {})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("BOOTSEER_ATTEMPT", "one", "is 'one'; give a whole number of at least 0"),
        ("BOOTSEER_ATTEMPT", "-1", "is -1; give a whole number of at least 0"),
        ("BOOTSEER_DEPS_DEADLINE_S", "soon", "is 'soon'; give a number of at least 0.1"),
        ("BOOTSEER_DEPS_ENABLED", "maybe", "is 'maybe'; give true or false"),
        ("BOOTSEER_DEPS_WAIT", "autp", "(did you mean 'auto'?); give one of auto, always, never"),
        ("BOOTSEER_DEPS_INSTALL", "pip 'x", "cannot be split into words"),
    ],
)
def test_a_bad_variable_names_itself_the_fault_and_the_valid(
    tmp_path: Path, variable: str, text: str, expected: str
) -> None:
    message = fault(tmp_path, "", {variable: text})
    assert message.startswith(f"the environment variable {variable} ")
    assert expected in message


def test_every_variable_is_read(tmp_path: Path) -> None:
    texts = {
        "text": "x",
        "whole number": "70",
        "number": "7.5",
        "truth value": "off",
        "list of texts": "/a:/b",
        "command": "pip install 'a b'",
    }
    read = {"list of texts": ("/a", "/b"), "command": ("pip", "install", "a b")}
    read |= {"text": "x", "whole number": 70, "number": 7.5, "truth value": False}
    path = write(tmp_path, "")
    for setting in loading.list_settings():
        text = setting.choices[-1] if setting.choices else texts[setting.shape]
        loaded = loading.load_strictly(path, {setting.env: text})
        value = getattr(getattr(loaded, setting.section), setting.name)
        assert value == (text if setting.choices else read[setting.shape]), setting.key
        assert loading.parse_flag(f"{setting.key}={text}") == (setting.key, value)


def test_no_two_settings_share_a_variable() -> None:
    variables = [setting.env for setting in loading.list_settings()]
    assert len(set(variables)) == len(variables)


def test_an_empty_variable_is_unset(tmp_path: Path) -> None:
    assert loading.load_strictly(write(tmp_path, ""), {"BOOTSEER_ATTEMPT": ""}) == Config()


@pytest.mark.parametrize("text", ["deps.stor=/s", "deps.store", "deps.wait=x"])
def test_a_bad_flag_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"--set deps\."):
        loading.parse_flag(text)


def test_reading_keeps_what_is_good(tmp_path: Path) -> None:
    text = "[job]\nuid = 'u'\nbad = 1\n[deps]\nstore = 3\ninstall = 'pip list'\n"
    loaded = loading.load_tolerantly(write(tmp_path, text), {"BOOTSEER_ATTEMPT": "x"})
    assert loaded.config.job == JobSettings(uid="u")
    assert loaded.config.deps == DepsSettings(install=("pip", "list"))
    assert [(p.section, p.key) for p in loaded.problems] == [
        ("job", "job.bad"),
        ("deps", "deps.store"),
        ("job", "job.attempt"),
    ]


@pytest.mark.parametrize(
    ("text", "install"),
    [
        ("[job]\nuid = \n[deps]\ninstall = ['pip',\n  'list']\n", ("pip", "list")),
        ("[deps]\nstore = /s\ninstall = 'pip list' # how\n", ("pip", "list")),
        ("[deps]\ninstall = 'a'\n[job\n[deps]\ninstall = 'b'\n", ()),
        ("[deps]\ninstall = ['pip', \n", ()),
        ("[job]\ninstall = 'pip list'\n[deps\n", ()),
        ("[deps]\ninstall = 3\n[job\n", ()),
        ("\x00", ()),
    ],
)
def test_the_install_command_survives_faults_elsewhere(
    tmp_path: Path, text: str, install: tuple[str, ...]
) -> None:
    loaded = loading.load_tolerantly(write(tmp_path, text), {})
    assert [p.section for p in loaded.problems] == [""]
    assert loaded.config == Config(deps=DepsSettings(install=install))


def test_lines_of_every_shape_of_key() -> None:
    text = (
        "a.b . 'c d' = 1\n"  # 1
        '"q\\u0041" = """\n[x]\n"""\n'  # 2-4
        "[t.u] # [v]\n"  # 5
        "d = 1979-05-27 07:32:00\n"  # 6
        "s = 'it''' \n".replace("'it'''", "'''it''''")  # 7: a quote before the closing ones
        + "l = [ # one\n  1, [2,\n 3], { k = 'v', m.n = [] },\n]\n"  # 8-11
        "[[r]]\nx = 1\n[r.sub]\ny = 2\n[[r]]\nx = 3\n"  # 12-17
    )
    assert tomllib.loads(text)
    lines = toml_lines.find_key_lines(text)
    expected: dict[toml_lines.Path, int] = {
        ("a",): 1,
        ("a", "b", "c d"): 1,
        ("qA",): 2,
        ("t", "u"): 5,
        ("t", "u", "d"): 6,
        ("t", "u", "s"): 7,
        ("t", "u", "l"): 8,
        ("t", "u", "l", 1, 1): 10,
        ("t", "u", "l", 2, "m", "n"): 10,
        ("r",): 12,
        ("r", 0, "x"): 13,
        ("r", 0, "sub", "y"): 15,
        ("r", 1): 16,
        ("r", 1, "x"): 17,
    }
    assert {path: lines.get(path) for path in expected} == expected


def paths_of(value: object, path: toml_lines.Path = ()) -> set[toml_lines.Path]:
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    else:
        return {path}
    return {path}.union(*(paths_of(child, (*path, key)) for key, child in children))


KEYS = st.one_of(
    st.text(alphabet="abc-_1", min_size=1, max_size=3),
    st.text(alphabet="a.\"' é#[]=", max_size=4),
)
SCALARS = st.one_of(
    st.integers(-9, 9), st.booleans(), st.text(alphabet="a\"'\\\n#[]{},= ", max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


def toml_text(text: str) -> str:
    escaped = "".join(f"\\u{ord(c):04x}" if c in '"\\\n' else c for c in text)
    return f'"{escaped}"'


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_text(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[\n" + "".join(f"{toml_value(item)}, # ]\n" for item in value) + "]"
    return toml_text(value) if isinstance(value, str) else str(value)


@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=3), max_size=3))
def test_every_key_of_a_generated_document_has_a_line(document: dict[str, dict]) -> None:
    text, expected = "", {}
    for table, pairs in document.items():
        expected[(table,)] = text.count("\n") + 1
        text += f"[{toml_text(table)}]\n"
        for key, value in pairs.items():
            expected[(table, key)] = text.count("\n") + 1
            text += f"{toml_text(key)} = {toml_value(value)}\n"
    assert tomllib.loads(text) == document
    lines = toml_lines.find_key_lines(text)
    assert set(lines) == paths_of(document) - {()}
    assert {path: lines[path] for path in expected} == expected


def test_defaults_without_a_home_are_nobody_elses(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert loading.default_store({}) == "/.local/share/bootseer/store"
    assert loading.default_cache({}) == "/.cache/bootseer"
    monkeypatch.undo()
    assert loading.default_store({"HOME": "/h"}) == "/h/.local/share/bootseer/store"
    assert loading.default_store({}).startswith(pwd.getpwuid(os.geteuid()).pw_dir)
