"""Secrets out of what is shown, logged, stored or hashed. Pure.

One list of names says what is secret. What is only shown (`redact_command`, `redact_url`,
`redact_message`, `safe_url`) may lose a harmless word as well. What identifies something
(`redact_for_key`, `redact_command_for_key`, `plain_query`) may not: two installs, or two objects,
that differ in more than a secret must not be taken for one.

`re` is imported late: it costs more than everything else that `bootseer run` does.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MARK = "***"

# A secret's name (of an option, variable, header or query parameter) contains one of these; a `-`
# or nothing may stand for `_` ...
_PARTS = (
    *("token", "secret", "passw", "credential", "signature", "delegation"),
    *("api_key", "access_key", "private_key"),
)
# ... or is one of these, or ends in one after `_` or `-`.
_ENDS = ("auth", "pat", "sig")

_PARTS_PATTERN = "|".join(_PARTS).replace("_", "[_-]?")
_NAME = rf"[\w-]*(?:{_PARTS_PATTERN})[\w-]*|(?:[\w-]*[_-])?(?:{'|'.join(_ENDS)})"
_NAME_TO_ITS_END = rf"[\w.-]*(?:{_PARTS_PATTERN}|passw\w+)"  # `token`, and not `tokenizer`

# How tokens of well-known services begin, and how many characters follow at least.
_TOKEN_FORMS = (
    *((f"gh{kind}_", 20) for kind in "opsur"),
    ("hf_", 20),
    ("github_pat_", 20),
    ("sk-", 20),
    ("glpat-", 10),
    *((f"xox{kind}-", 10) for kind in "abp"),
    ("pypi-AgE", 1),
    ("AKIA", 16),
)
_TOKEN = (
    r"\b(?:(?:gh[opsur]|hf)_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9]{20,}"
    r"|(?:glpat|xox[abp])-[\w-]{10,}|pypi-AgE[\w-]+|AKIA[0-9A-Z]{16}\b)"
)


def _hide_tokens(text: str, mark: str) -> str:
    """Hide what has the form of a well-known service's token."""
    if not _may_hold_token(text):
        return text
    import re

    return re.sub(_TOKEN, mark, text)


def _may_hold_token(text: str) -> bool:
    for start, length in _TOKEN_FORMS:
        at = text.find(start)
        while at >= 0:
            after = at + len(start)
            follows = text[after : after + length]
            plain = follows.replace("-", "").replace("_", "")
            is_token = len(follows) == length and (not plain or plain.isalnum())
            if is_token and not text[at - 1 : at].isalnum():
                return True
            at = text.find(start, at + 1)
    return False


# Commands, as shown.

_SCHEMES = ("bearer", "basic")  # of an HTTP Authorization header: the secret is the word after
_GIVE_A_VARIABLE = ("-e", "--env")
_GIVE_A_LOGIN = ("-u", "--user", "--proxy-user")
_QUOTES = "'\""


def redact_command(words: Iterable[str]) -> list[str]:
    """Return a command's words without what looks like a secret.

    Hidden are the credentials and queries of URLs; the value in `NAME=VALUE` and the word after
    `--NAME` or `NAME:` where NAME is a secret's; the password in `-u USER:PASSWORD`; tokens of
    well-known services. All this also inside a word that is itself a script or a header, as in
    `sh -c SCRIPT`; and, outside of scripts, the value of each variable after `-e`, `--env`.
    """
    out: list[str] = []
    hide = is_variable = False
    before = ""
    for word in words:
        option = "--env=" if word.startswith("--env=") else word[:2] if word[:2] == "-e" else ""
        name, equals, _ = word[len(option) :].partition("=")
        if equals and (option or is_variable) and name.isidentifier():
            out.append(option + name + "=" + MARK)
            hide = is_variable = False
            continue
        is_variable = word in _GIVE_A_VARIABLE
        name = word.partition("=")[0]
        if not (hide or _is_secret(name)) and len(word.split(None, 1)) > 1:
            out.append(_redact_script(word))
            continue
        shown, hide = _redact_word(word, hide, before)
        out.append(shown)
        before = word
    return out


def _is_secret(name: str) -> bool:
    if "://" in name or len(name.split(None, 1)) > 1:
        return False
    spelled = name.lower().replace("-", "_")
    plain = spelled.replace("_", "")
    if "auth" in plain or any(part.replace("_", "") in plain for part in _PARTS):
        return True
    return spelled.strip(_QUOTES + ":").rpartition("_")[2] in _ENDS


def _redact_word(word: str, hide: bool, before: str) -> tuple[str, bool]:
    """Return a word as it may be shown, and whether the next one is to be hidden."""
    bare = word.strip(_QUOTES)
    if hide and not word.startswith("-"):
        return MARK, bare.lower() in _SCHEMES
    head, _, tail = word.partition(":")
    if before in _GIVE_A_LOGIN and tail and not (head.isdigit() and tail.isdigit()):
        return f"{head}:{MARK}", False  # numbers are a uid and a gid
    if tail.strip(_QUOTES) and head.strip(_QUOTES).replace("-", "").isalpha() and _is_secret(head):
        return f"{head}:{MARK}", tail.lower() in _SCHEMES
    name, equals, _ = word.partition("=")
    if _is_secret(name):
        if equals:
            return name + "=" + MARK, False
        return _hide_tokens(word, MARK), word.startswith("-") or bare.endswith(":")
    return _hide_tokens(redact_url(word), MARK), bare.lower() in _SCHEMES


def _redact_script(text: str) -> str:
    """Redact the words of a script; what stays keeps its place and its lines (tabs are blanks)."""
    out: list[str] = []
    hide = False
    before = quote = ""  # `quote`: open since a hidden value began
    for word in text.replace("\t", " ").replace("\n", " \n ").split(" "):
        if word in ("", "\\", "\n"):
            out.append(word)  # a line that goes on does not separate an option from its value
        elif quote:
            quote = "" if quote in word else quote
        else:
            shown, hide = _redact_word(word, hide, before)
            out.append(shown)
            before = word
            if shown == MARK or shown.endswith("=" + MARK):
                quote = _open_quote(word)
    return " ".join(out).replace(" \n ", "\n")


def _open_quote(word: str) -> str:
    """Return the quote that a value (after `=`, or the whole word) opens and leaves open."""
    value = word.partition("=")[2] or word
    return value[0] if value[0] in _QUOTES and value.count(value[0]) == 1 else ""


# URLs and messages, as shown.

# Up to the last `@` before the path: a password may hold one.
_URL_LOGIN = r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"]*@"
_MESSAGE_MARK = "…"
_MESSAGE_VALUE = (
    rf"(?i)({_NAME_TO_ITS_END}|sig|(?<![a-z])(?:{'|'.join(_ENDS)}))(=|%3d)[^\s&\"'<>,;)\]]+"
)
_BEARER = r"(?i)\b(bearer|basic|negotiate)\s+[A-Za-z0-9+/=._~-]{6,}"


def redact_url(text: str) -> str:
    """Return `text` with user, password and query of every URL in it replaced by `***`."""
    out: list[str] = []
    rest = text
    while True:
        head, colon, rest = rest.partition("://")
        out.append(head + colon)
        if not colon:
            return "".join(out)
        end = len(rest)
        for stop in " \t\r\n\"'<>,;":
            at = rest.find(stop, 0, end)
            end = at if at >= 0 else end
        url, rest = rest[:end], rest[end:]
        url, query, _ = url.partition("?")
        authority, slash, path = url.partition("/")
        if "@" in authority:
            authority = f"{MARK}@" + authority.rpartition("@")[2]
        out.append(authority + slash + path + (f"?{MARK}" if query else ""))


def safe_url(url: str) -> str:
    """Return one URL without user, password, query and fragment."""
    import re

    return re.sub(_URL_LOGIN, r"\1", url.partition("?")[0].partition("#")[0])


def redact_message(text: str) -> str:
    """Return a foreign message without the tokens, signatures and passwords that it may quote."""
    import re

    text = re.sub(_MESSAGE_VALUE, rf"\1\2{_MESSAGE_MARK}", text)
    text = re.sub(_BEARER, rf"\1 {_MESSAGE_MARK}", re.sub(_URL_LOGIN, r"\1", text))
    return _hide_tokens(text, _MESSAGE_MARK)


# What identifies an install or an object.

# A pattern takes longer to compile than a start's few words to search, and most words hold none of
# the signs without which it cannot match. Signs in small letters are looked for in ASCII alone:
# there are letters of other alphabets that a pattern takes for an `s` or a `k`.
_VALUE_SIGNS = ("token", "secret", "passw", "credential", "delegation", "auth", "pat", "sig", "key")
_HEADER_SIGNS = ("authorization", "token", "key")
_LOGIN_SIGNS = ("-u",)
# `tokenizers==0.19` and `tiktoken = "^0.7"` are packages: what decides an install must stay.
_NO_VERSION = r"(?!=|['\"]?[\^~<>=! ]*\d+(?:\.[\w*]+)+)"
_VALUE = (
    rf"(?im)(?P<name>(?:^|(?<=[\s?&;'\"(]))-{{0,2}}(?:{_NAME}|key)=)"
    rf"{_NO_VERSION}(?:'[^']*'|\"[^\"]*\"|[^\s&'\"]+)"
)
_HEADER = (
    r"(?i)(?P<name>\b(?:(?:proxy-)?authorization|(?:private|job|deploy|x(?:-[\w-]+)?)-(?:token|key))"
    r"\s*:\s*)(?:(?:bearer|basic|token)\s+)?[^\s'\"]+"
)
_LOGIN = r"(?P<name>(?:^|\s)(?:-u|--user|--proxy-user)[\s=]*['\"]?[^\s:'\"]+:)[^\s'\"]+"
_OPTION = rf"--(?!no-)(?:{_NAME})"  # `--no-auth` has no value
_OPTION_VALUE = rf"(?i)(?P<name>{_OPTION}[ \t]+['\"]?)[^\s'\"-][^\s'\"]*"
_VARIABLE = (
    r"(?i)token(?!ize)|" + "|".join(_PARTS[1:]).replace("_", "_?") + r"|username|keyring"
    rf"|(?:^|_)(?:{'|'.join(_ENDS)})$"
)
# Parameters of signed URLs and tokens, as S3, GCS, Azure, CloudFront and WebHDFS spell them.
_QUERY_NAME = (
    rf"(?i){_NAME_TO_ITS_END}"
    r"|sig|se|sp|st|sv|sr|spr|skoid|sktid|skt|ske|sks|skv"
    r"|awsaccesskeyid|googleaccessid|expires|policy|key-pair-id|x-(?:amz|goog)-[\w-]+"
)


def redact_for_key(text: str) -> str:
    """Return a text without credentials; applying it twice changes nothing more.

    Removed are user and password of a URL; the value of a query parameter, header or shell
    assignment with a secret's name; the password of curl's `-u USER:PASSWORD`; tokens of
    well-known services. The rest stays, so that two starts which differ in nothing but a token
    have one key.
    """
    import re

    plain = re.sub(_URL_LOGIN, r"\1", text) if "://" in text else text
    small = plain.lower() if plain.isascii() else ""
    if "=" in plain and _has(_VALUE_SIGNS, small):
        plain = re.sub(_VALUE, rf"\g<name>{MARK}", plain)
    if ":" in plain:
        for pattern, signs in ((_HEADER, _HEADER_SIGNS), (_LOGIN, _LOGIN_SIGNS)):
            if _has(signs, small):
                plain = re.sub(pattern, rf"\g<name>{MARK}", plain)
    return _hide_tokens(plain, MARK)


def _has(signs: Iterable[str], small: str) -> bool:
    """Whether a text can hold what its pattern looks for; "" is one that is not looked through."""
    return not small or any(sign in small for sign in signs)


def redact_command_for_key(command: Iterable[str]) -> list[str]:
    """Return a command's words as `redact_for_key` does, `--token VALUE` pairs included, also
    those in a word that is itself a script."""
    import re

    out: list[str] = []
    before = ""
    for word in command:
        hide = before.startswith("--") and re.fullmatch(_OPTION, before, re.IGNORECASE)
        login = ":" in word and re.fullmatch(_LOGIN, f"{before} {word}")
        if hide or login:
            out.append(MARK if hide else f"{word.partition(':')[0]}:{MARK}")
        else:
            plain = redact_for_key(word)
            is_script = "--" in plain and " " in plain
            out.append(re.sub(_OPTION_VALUE, rf"\g<name>{MARK}", plain) if is_script else plain)
        before = word
    return out


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name is never to be read into a key."""
    import re

    return not name.upper().endswith("VERSION") and bool(re.search(_VARIABLE, name))


def plain_query(query: str) -> str:
    """What of a URL's query tells objects apart: all but signatures and tokens, which change."""
    import re

    return "&".join(
        p for p in query.split("&") if p and not re.fullmatch(_QUERY_NAME, p.partition("=")[0])
    )
