"""Secrets are hidden by all who show, log or hash a text, by each with rules of its own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.events import redaction
from bootseer.events.redaction import (
    is_secret_variable,
    plain_query,
    redact_command,
    redact_command_for_key,
    redact_for_key,
    redact_message,
    redact_url,
    safe_url,
)
from tests.support.commands.run import PACKAGE

SECRET = "s3cr3tv4lue"
TOKEN = "a1B2" * 6

# What events, dependency keys and the stores' messages all hide, however they differ elsewhere.
IN_TEXTS = [
    f"https://user:{SECRET}@host/simple",
    f"https://{SECRET}@host/simple",
    f"https://user:{SECRET}@more@host/simple",
    f"git+https://oauth2:{SECRET}@host/r.git@v1#egg=x",
    f"https://auth-token:{SECRET}@host/simple",
    f"https://host/x.whl?token={SECRET}&b=1",
    f"https://host/x.whl?X-Amz-Signature={SECRET}",
    f"https://host/x.whl?sv=1&sig={SECRET}",
    f"http://dn:2/p?op=OPEN&delegation={SECRET}&offset=1",
    f"--password={SECRET}",
    f"--passwd={SECRET}",
    f"--api-key={SECRET}",
    f"--access-key={SECRET}",
    f"--private-key={SECRET}",
    f"--auth={SECRET}",
    f"--delegation={SECRET}",
    f"HF_TOKEN={SECRET} pip install x",
    f"API_KEY={SECRET} pip install x",
    f"GITHUB_PAT={SECRET} pip install x",
    f"AWS_SECRET_ACCESS_KEY={SECRET} aws s3 ls",
    f"CLIENT_CREDENTIAL={SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"Authorization: Basic {SECRET}",
    f"hf_{TOKEN}",
    f"git clone https://ghp_{TOKEN}@github.com/a/b",
    f"login github_pat_{TOKEN} now",
    f"sk-{TOKEN}",
    f"glpat-{TOKEN}",
    "xoxb-12345678901",
    "pypi-AgEIcHlwaS5",
    "AKIAABCDEFGHIJKLMNOP",
]
IN_COMMANDS = [
    *IN_TEXTS,
    f"pip install --token {SECRET} x",
    f"pip install --access-key {SECRET} x",
    f"curl -u me:{SECRET} https://h",
    f"curl --user me:{SECRET} https://h",
    f"curl -H Private-Token:{SECRET} https://h",
    f"curl -H X-Auth-Token:{SECRET} https://h",
]
SHOWN = re.compile(rf"{SECRET}|{TOKEN}|12345678901|IcHlwaS5|ABCDEFGHIJKLMNOP")


@pytest.mark.parametrize("text", IN_TEXTS)
def test_texts_keep_no_secret(text: str) -> None:
    assert not SHOWN.search(redact_message(f"cannot do it: {text}: refused"))
    for redacted in (redact_for_key(text), redact_for_key(f"x {text}")):
        assert not SHOWN.search(redacted)
        assert redact_for_key(redacted) == redacted


@pytest.mark.parametrize("command", IN_COMMANDS)
def test_commands_keep_no_secret(command: str) -> None:
    words = command.split(" ")
    assert not SHOWN.search(" ".join(redact_command(words)))
    assert not SHOWN.search(" ".join(redact_command(["sh", "-c", f"cd x && {command}"])))
    if "Authorization" not in command:  # for a key, a header is one word
        assert not SHOWN.search(" ".join(redact_command_for_key(words)))
    assert not SHOWN.search(" ".join(redact_command_for_key(["sh", "-c", f"cd x && {command}"])))


@pytest.mark.parametrize(
    "text",
    [
        "six==1.16",
        "tokenizers==0.19",
        'tiktoken = "^0.7"',
        "git+https://host/r.git@v1",
        "torch @ https://h/t.whl#sha256=ab",
        "pip install --author me sk-learn-with-a-very-long-name",
        "python -m train --lr 1e-3 --data /mnt/disk-1/a1B2a1B2a1B2a1B2a1B2a1B2",
        "authlib compat=1 format=x path=/a/b",
        "basic\nrequests",
        "x --bypasswarmup=3 --pass-weights=w",
    ],
)
def test_what_decides_an_install_stays(text: str) -> None:
    assert redact_for_key(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "a plain message about tokens and passwords",
        "no tokenizer=gpt2, compat=2, path=/x",
        "http://host:1/path?op=OPEN&offset=5 refused",
    ],
)
def test_a_message_keeps_the_rest(text: str) -> None:
    assert redact_message(text) == text


@pytest.mark.parametrize(
    ("query", "rest"),
    [
        ("versionId=3&X-Amz-Signature=a&Expires=4", "versionId=3"),
        ("delegation=a&access_token=b&api_key=c&secret=d&password=e", ""),
        ("api-key=c&client_secret=d&passwd=e", "api-key=c&client_secret=d&passwd=e"),
        ("se=1&sp=r&sv=2&sig=a&id=7", "id=7"),
        ("tokenizer=gpt2&pat=7&author=x&key=a/b&secretary=y", "tokenizer=gpt2&pat=7&author=x"),
    ],
)
def test_a_query_keeps_what_tells_objects_apart(query: str, rest: str) -> None:
    assert plain_query(query).startswith(rest)
    assert (rest == "") == (plain_query(query) == "")


def test_an_urls_login_goes_whole() -> None:
    url = f"https://user:{SECRET}@{SECRET}@host/x?{SECRET}#{SECRET}"
    assert safe_url(url) == "https://host/x"
    assert (
        redact_url(f"see {url}, <{url}>") == "see https://***@host/x?***, <https://***@host/x?***>"
    )
    assert redact_message("http://h/a?mail=b@c") == "http://h/a?mail=b@c"
    quoted = "https://u:it's@h/c"
    assert safe_url(quoted) == "https://h/c"
    assert redact_message(f"cannot get {quoted}") == "cannot get https://h/c"


@pytest.mark.parametrize(
    "name", ["CUDA_SIG", "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_FLASK_AUTH", "TOKEN_VERSION"]
)
def test_a_variable_that_decides_an_install_may_go_into_a_key(name: str) -> None:
    assert not is_secret_variable(name)


def test_numbers_after_user_are_no_login() -> None:
    words = ["docker", "run", "-u", "1000:1000", "image:1"]
    assert redact_command(words) == words


@given(st.text(alphabet="ghpsk_-xobAKIA/ a1é", max_size=60))
def test_events_hide_each_token_that_keys_and_messages_hide(text: str) -> None:
    if re.search(redaction._TOKEN, text):
        assert redaction._hide_tokens(text) != text


def test_a_plain_command_needs_no_patterns() -> None:
    """`re` takes longer to import than all that `bootseer run` does."""
    code = (
        "import sys; from bootseer.events import redact, redact_url; before = 're' in sys.modules;"
        "redact(['sh', '-c', 'pip install x --token y', '/mnt/disk-1', 'https://u:p@h/x?y']);"
        "assert before or 're' not in sys.modules"
    )
    command = [sys.executable, "-S", "-c", code]
    subprocess.run(command, check=True, timeout=60, env={"PYTHONPATH": str(PACKAGE.parent)})
