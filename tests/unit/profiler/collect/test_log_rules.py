"""Rule files: what they say, and where they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.profiler.collect.log_rules import rules


def test_a_whole_rule() -> None:
    [rule] = rules.parse(
        "[DEFAULT]\ntime = ^(\\S+)\ntime_format = unix\n[r]\nphase = model.init\n"
        "begin = Building\n    Making\nend = Built\nwait = yes\nonce = true\nagain = restart\n"
        "until = next\nunopened = ignore\nstatus = error\ntime_zone = -03:30\n",
        "r.ini",
    )
    assert [pattern.pattern for pattern in rule.begin] == ["Building", "Making"]
    assert (rule.phase, rule.status, rule.until) == ("model.init", "error", ("next",))
    assert (rule.wait, rule.once, rule.restart, rule.unopened_point) == (True, True, True, False)
    assert rule.time is not None
    assert (rule.time_format, rule.utc_offset_s) == ("unix", -12600)


def test_percent_signs_are_no_interpolation() -> None:
    [rule] = rules.parse("[r]\nphase=x\npoint=\\d+%\\|\ntime=(.*)\ntime_format=%H:%M", "r.ini")
    assert rule.time_format == "%H:%M"
    assert rule.point[0].search("5%|")


@pytest.mark.parametrize(
    ("text", "section", "key", "line", "words"),
    [
        ("", None, None, None, "holds no rule"),
        ("phase = x\n", None, None, 1, "before the first"),
        ("[a]\nphase = x\nbegin = (\n", "a", "begin", 3, "regular expression"),
        ("[a]\nphase = x\nbegin = a*\n", "a", "begin", 3, "matches every line"),
        ("[a]\n\nphase = x\nbogus = 1\npoint = y\n", "a", "bogus", 4, "is not a key"),
        ("[a]\npoint = x\n", "a", None, 1, "`phase` is missing"),
        ("[a]\nphase = no good\npoint = x\n", "a", "phase", 2, "not a phase name"),
        ("[a]\nphase = x\n", "a", None, 1, "must be given"),
        ("[a]\nphase = x\npoint = y\nwait = perhaps\n", "a", "wait", 4, "true or false"),
        ("[a]\nphase = x\npoint = y\nstatus = bad\n", "a", "status", 4, "must be one of"),
        ("[a]\nphase = x\npoint = y\ntime = \\d\n", "a", "time", 4, "needs a group"),
        ("[a]\nphase = x\npoint = y\ntime_zone = Mars\n", "a", "time_zone", 4, "must be local"),
        ("[a]\nphase=x\npoint=y\n[a]\nphase=z\n", "a", None, 4, "there twice"),
        ("[a]\nphase=x\nphase=y\n", "a", "phase", 3, "there twice"),
        ("[a]\nphase=x\nnonsense\n", None, None, 3, "neither"),
    ],
)
def test_errors_name_the_place(
    text: str, section: str | None, key: str | None, line: int | None, words: str
) -> None:
    with pytest.raises(rules.RuleFileError, match=words) as caught:
        rules.parse(text, "my.ini")
    error = caught.value
    assert (error.file, error.section, error.key, error.line) == ("my.ini", section, key, line)
    assert str(error).startswith("my.ini")
    assert "\n" not in str(error)
    assert isinstance(error, ValueError)


def test_shipped_rules_are_found_by_name_and_files_by_path(tmp_path: Path) -> None:
    names = [
        *("deepspeed", "huggingface", "lightning", "megatron", "nemo", "pip", "ray", "sglang"),
        *("torchrun", "torchtitan", "uv", "vllm"),
    ]
    assert rules.list_shipped() == names
    for name in names:
        assert rules.load(name)
    own = tmp_path / "own.ini"
    own.write_text("[a]\nphase = x\npoint = y\n")
    assert [rule.name for rule in rules.load(str(own))] == ["a"]
    with pytest.raises(rules.RuleFileError, match="known: deepspeed"):
        rules.load("nosuch")
    with pytest.raises(FileNotFoundError):
        rules.load("./nosuch.ini")


def test_a_binary_rule_file_is_an_error_of_ours(tmp_path: Path) -> None:
    bad = tmp_path / "bad.ini"
    bad.write_bytes(b"[a]\n\xff\xfe\n")
    with pytest.raises(rules.RuleFileError, match="UTF-8") as caught:
        rules.load(str(bad))
    assert caught.value.line == 2
