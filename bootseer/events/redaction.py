"""Secrets out of what is shown, logged, stored or hashed. Pure.

There are three uses, and their rules differ, since what a mistake costs differs:

- *shown* (`redact_command`, `redact_url`): commands and URLs in events. Rather hide too much.
- *keys* (`redact_for_key`, `redact_command_for_key`, `is_secret_variable`): what a dependency key
  and its record hold. Two installs must never be taken for one: hide only what is surely secret.
- *messages* (`redact_message`, `safe_url`, `plain_query`): errors and URLs of stores. Keep what
  helps to find the fault, or tells two objects apart.

So only what is the same to the letter is shared. `re` is imported late: it costs more than
everything else that `bootseer run` does.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MARK = "***"

# Keys and messages: words that have the form of a well-known service's token.
_TOKEN = (
    r"\b(?:(?:gh[opsur]|hf)_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[A-Za-z0-9]{20,}"
    r"|(?:glpat|xox[abp])-[\w-]{10,}|pypi-AgE[\w-]+|AKIA[0-9A-Z]{16}\b)"
)


# Shown.

_SECRET_WORDS = (
    "token",
    "passw",
    "secret",
    "credential",
    "signature",
    "apikey",
    "api_key",
    "access_key",
    "private_key",
    "auth",
    "delegation",
)
_SECRET_END = "pat"  # the last of a name's words: `GITHUB_PAT`, and not `--path`
# How tokens of well-known services begin, how many characters follow at least, and which may be
# among them besides letters and digits.
_TOKEN_FORMS = (
    *((f"gh{kind}_", 20, "") for kind in "opsur"),
    *(("hf_", 20, ""), ("github_pat_", 20, "_"), ("AKIA", 16, ""), ("pypi-AgE", 1, "-_")),
    *(("sk-", 20, ""), ("sk-proj-", 20, "-_"), ("sk-ant-", 20, "-_"), ("glpat-", 10, "-_")),
    *((f"xox{kind}-", 10, "-_") for kind in "abp"),
)
_SCHEMES = ("bearer", "basic")  # of an HTTP Authorization header: the secret is the word after
_GIVE_A_VARIABLE = ("-e", "--env")
_GIVE_A_LOGIN = ("-u", "--user", "--proxy-user")
_GIVE_A_HEADER = ("-H", "--header", "--proxy-header")
_BARE_HEADERS = ("authorization", "-token", "-secret", "-password", "api-key")  # their ends
_QUOTES = "'\""


def redact_command(words: Iterable[str]) -> list[str]:
    """Shown: return a command's words without what looks like a secret.

    Hidden are the credentials and queries of URLs, the value in `NAME=VALUE` and the word after
    `--NAME` or `NAME:` where NAME speaks of a token, password, secret, signature, credential,
    authorization or a key to something; the password in `-u USER:PASSWORD`; tokens of well-known
    services; also inside a word that is itself a script or a header, as in `sh -c SCRIPT`; and,
    outside of scripts, the value of each variable after `-e`, `--env`.
    """
    out: list[str] = []
    hide = is_variable = False
    before = ""
    for word in words:
        last, before = before, word
        option = "--env=" if word.startswith("--env=") else word[:2] if word[:2] == "-e" else ""
        name, equals, _ = word[len(option) :].partition("=")
        if equals and (option or is_variable) and name.isidentifier():
            out.append(option + name + "=" + MARK)
            hide = is_variable = False
            continue
        is_variable = word in _GIVE_A_VARIABLE
        name = word.partition("=")[0]
        is_one = hide or _is_secret(name) or _password(word, last)
        if not is_one and len(word.split(None, 1)) > 1:
            out.append(_redact_script(word, last))
            continue
        shown, hide = _redact_word(word, hide, last)
        out.append(shown)
    return out


def redact_url(text: str) -> str:
    """Shown: return `text` with user, password and query of every URL in it replaced by `***`."""
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


def _is_secret(name: str) -> bool:
    if len(name.split(None, 1)) > 1:
        return False
    if "://" in name:  # what its login holds is no name
        for mark in "&;#,":
            name = name.replace(mark, "?")
        _, asks, name = name.rpartition("?")
        name = name if asks else ""
    plain = name.lower().replace("-", "_")
    ends = plain.strip(_QUOTES + ":").rpartition("_")[2] == _SECRET_END
    return ends or any(mark in plain for mark in _SECRET_WORDS)


def _redact_word(word: str, hide: bool, before: str) -> tuple[str, bool]:
    """Return a word as it may be shown, and whether the next one is to be hidden."""
    bare = word.strip(_QUOTES)
    if hide and not word.startswith("-"):
        return MARK, bare.lower() in _SCHEMES
    password = _password(word, before)
    if password:
        return word[: -len(password)] + MARK, False
    if _is_secret_header(word, before):
        head, _, tail = word.partition(":")
        if tail.strip(_QUOTES):
            return f"{head}:{MARK}", tail.lower() in _SCHEMES
        return word, True
    name, equals, _ = word.partition("=")
    if _is_secret(name):
        if equals:
            address, mark, query = name.partition("?")
            return f"{redact_url(address)}{mark}{query}={MARK}", False
        return _hide_tokens(redact_url(word)), word.startswith("-") or bare.endswith(":")
    return _hide_tokens(redact_url(word)), bare.lower() in _SCHEMES


def _is_secret_header(word: str, before: str) -> bool:
    """Whether a word is `NAME:VALUE` or `NAME:` of an HTTP header whose value is secret."""
    header = _value_of(word, before, _GIVE_A_HEADER)
    name, colon, _ = (header or word).partition(":")
    bare = name.strip(_QUOTES)
    if not colon or not bare.replace("-", "").isalpha():
        return False
    if header or name != bare:
        return _is_secret(bare)
    return bare.lower().endswith(_BARE_HEADERS)  # `auth:app` and `auth-node:29500` are none


def _password(word: str, before: str) -> str:
    """Return the password in `-u USER:PASSWORD`, in `-uUSER:PASSWORD` and `--user=USER:PASSWORD`;
    numbers are a user and a group, and others' `-u` stands before an address or a time."""
    login = _value_of(word, before, _GIVE_A_LOGIN)
    user, _, password = login.partition(":")
    user = user.strip(_QUOTES)
    if "://" in login or user.startswith(("+", ")", "$(")) or len(user.split(None, 1)) > 1:
        return ""
    if login != word and "=" in user:  # `-url=HOST:PORT`
        return ""
    return "" if user.isdigit() and password.strip(_QUOTES).isdigit() else password


def _value_of(word: str, before: str, options: tuple[str, ...]) -> str:
    """Return the value of an option, whose first name is short: `-o V`, `-oV` or `--option=V`."""
    if before in options:
        return word
    if word.startswith(tuple(f"{option}=" for option in options[1:])):
        return word.partition("=")[2]
    return word[2:] if word.startswith(options[0]) else ""


def _hide_tokens(text: str) -> str:
    """Hide what has the form of a well-known service's token."""
    for start, length, others in _TOKEN_FORMS:
        at = text.find(start)
        while at >= 0:
            first = end = at + len(start)
            if not text[at - 1 : at].isalnum():
                while end < len(text) and (text[end].isalnum() or text[end] in others):
                    end += 1
                if end - first >= length:
                    text = text[:at] + MARK + text[end:]
            at = text.find(start, at + 1)
    return text


def _redact_script(text: str, before: str) -> str:
    """Redact the words of a script; what stays keeps its place and its lines (tabs are blanks)."""
    out: list[str] = []
    hide = False
    quote = ""  # open since a hidden value began
    for word in text.replace("\t", " ").replace("\n", " \n ").split(" "):
        if word in ("", "\\", "\n"):
            out.append(word)  # a line that goes on does not separate an option from its value
        elif quote:
            quote = "" if quote in word else quote
            hide = hide and bool(quote)
        else:
            shown, hide = _redact_word(word, hide, before)
            out.append(shown)
            before = word
            if shown == MARK or shown.endswith((f"={MARK}", f":{MARK}")):
                quote = _open_quote(word)
    return " ".join(out).replace(" \n ", "\n")


def _open_quote(word: str) -> str:
    """Return the quote that a value (after `=`, or the whole word) opens and leaves open."""
    value = word.partition("=")[2] or word
    return value[0] if value[0] in _QUOTES and value.count(value[0]) == 1 else ""


# Keys.

_KEY_NAME = (
    r"[\w-]*(?:token|secret|passw(?:or)?d|credential|signature|api[_-]?key|access[_-]?key)[\w-]*"
    r"|(?:[\w-]*[_-])?(?:auth|pat|private_key)|delegation"
)

# A pattern takes longer to compile than a start's few words to search, and most words hold none of
# the signs without which it cannot match. Signs in small letters are looked for in ASCII alone:
# there are letters of other alphabets that a pattern takes for an `s` or a `k`.
_KEY_URL_USER = r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"@]*(?:@[^/\s'\"@]*)*@"
# `tokenizers==0.19` and `tiktoken = "^0.7"` are packages: what decides an install must stay.
_NO_VERSION = r"(?!=|['\"]?[\^~<>=! ]*\d+(?:\.[\w*]+)+)"
_NAMED = (
    rf"(?im)(?P<name>(?:^|(?<=[\s?&;'\"(]))-{{0,2}}(?:{_KEY_NAME}|(?:[\w-]*[_-])?private-key|sig"
    r"|key)(?==))(?P<mark>=)"
    rf"{_NO_VERSION}(?:'[^']*'|\"[^\"]*\"|[^\s&'\"]+)"
)
_HEADER = (
    r"(?i)(?P<name>\b(?:(?:proxy-)?authorization|(?:private|job|deploy|x(?:-[\w-]+)?)"
    r"-(?:token|key))\s*:\s*)(?:(?:bearer|basic|token)\s+)?[^\s'\"]+"
)
_LOGIN = r"(?P<name>(?:^|\s)(?:-u|--user|--proxy-user)[\s=]*['\"]?[^\s:'\"]+:)[^\s'\"]+"
_NAMED_SIGNS = ("token", "secret", "passw", "credential", "deleg", "auth", "pat", "sig", "key")
_HEADER_SIGNS = ("authorization", "token", "key")
_LOGIN_SIGNS = ("-u",)
_TOKEN_SIGNS = ("gh", "hf_", "github_pat_", "sk-", "glpat-", "xox", "pypi-AgE", "AKIA")
_OPTION = rf"(?i)--(?:{_KEY_NAME})"
# In a script, what follows may be another command, a variable, or a requirement after a flag.
_OPTION_VALUE = (
    r"(?i)(?P<name>(?:^|(?<=[\s'\"(]))--(?!(?:no|use|with|without|ask|skip|enable|disable|allow"
    r"|require|always|print|show)-)(?:[\w-]*[_-])?"
    r"(?:token|secret|passw(?:or)?d|credential|signature|(?:api|access)[_-]?key|pat)"
    r"(?:[ \t]|\\\n)+)(?!['\"]?(?:\$|[\w.\[\]-]+[=~<>!]=\d))"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"\\;&|<>()-][^\s'\";&|<>()]*)"
)
_VARIABLE = (
    r"TOKEN(?!IZE)|SECRET|PASSWORD|PASSWD|CREDENTIAL|SIGNATURE"
    r"|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|(?:^|_)PAT$|USERNAME|KEYRING"
)


def redact_for_key(text: str) -> str:
    """Keys: return a text without credentials; applying it twice changes nothing more.

    Removed are user and password of a URL; the value of a query parameter, option, header or shell
    assignment whose name says that it is secret; the password of curl's `-u USER:PASSWORD`; tokens
    of well-known services. The rest stays: two starts have one key only where they differ in
    nothing but a secret.
    """
    import re

    plain = text
    if "://" in plain:
        plain = re.sub(_KEY_URL_USER, r"\g<scheme>", plain)
    small = plain.lower() if plain.isascii() else ""
    if "=" in plain and _has(_NAMED_SIGNS, small):
        plain = re.sub(_NAMED, rf"\g<name>\g<mark>{MARK}", plain)
    if ":" in plain:
        for pattern, signs in ((_HEADER, _HEADER_SIGNS), (_LOGIN, _LOGIN_SIGNS)):
            if _has(signs, small):
                plain = re.sub(pattern, rf"\g<name>{MARK}", plain)
    if any(sign in plain for sign in _TOKEN_SIGNS):
        plain = re.sub(_TOKEN, MARK, plain)
    return plain


def _has(signs: Iterable[str], small: str) -> bool:
    """Whether a text can hold what its pattern looks for; "" is one that is not looked through."""
    return not small or any(sign in small for sign in signs)


def redact_command_for_key(command: Iterable[str]) -> list[str]:
    """Keys: return a command's words as `redact_for_key` does, and without the value in
    `--token VALUE`, in scripts too."""
    import re

    out: list[str] = []
    before = ""
    for word in command:
        hide = before.startswith("--") and re.fullmatch(_OPTION, before)
        login = ":" in word and re.fullmatch(_LOGIN, f"{before} {word}")
        out.append(MARK if hide else f"{word.partition(':')[0]}:{MARK}" if login else _script(word))
        before = word
    return out


def _script(word: str) -> str:
    plain = redact_for_key(word)
    small = plain.lower() if plain.isascii() else ""
    if "--" in plain and " " in plain and _has(_NAMED_SIGNS, small):
        import re

        plain = re.sub(_OPTION_VALUE, rf"\g<name>{MARK}", plain)
    return plain


def is_secret_variable(name: str) -> bool:
    """Keys: whether an environment variable of this name is never to be read into one."""
    import re

    upper = name.upper()
    return not upper.endswith("VERSION") and bool(re.search(_VARIABLE, upper))


# Messages.

_MESSAGE_MARK = "…"
_MESSAGE_VALUE = (
    r"(?i)(delegation|sig|passw(?:or)?d|secret|(?<![a-z])(?:auth|pat)"
    r"|(?<![\w-])[\w-]*(?:token|signature|credential|(?:api|access|private|secret)[_-]?key))"
    r"(=|%3d)[^\s&\"'<>,;)\]]+"
)
# Up to the last `@`: a password may hold one.
_MESSAGE_URL_USER = r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@?#]+@(?:[^/\s@?#'\"<>]*@)*"
_BEARER = r"(?i)\b(bearer|basic|negotiate)\s+[A-Za-z0-9+/=._~-]{6,}"
# Parameters of signed URLs and tokens, as S3, GCS, Azure, CloudFront and WebHDFS spell them.
_QUERY_NAME = (
    r"(?i)delegation|token|secret|password|signature|credential|apikey|api_key"
    r"|sig|se|sp|st|sv|sr|spr|skoid|sktid|skt|ske|sks|skv"
    r"|awsaccesskeyid|googleaccessid|expires|policy|key-pair-id|[\w.-]*token|x-(amz|goog)-[\w-]+"
)


def redact_message(text: str) -> str:
    """Messages: return a foreign one without the tokens, signatures and passwords that it may
    quote."""
    import re

    text = re.sub(_TOKEN, _MESSAGE_MARK, re.sub(_MESSAGE_VALUE, rf"\1\2{_MESSAGE_MARK}", text))
    return re.sub(_BEARER, rf"\1 {_MESSAGE_MARK}", re.sub(_MESSAGE_URL_USER, r"\1", text))


def safe_url(url: str) -> str:
    """Messages: return any one URL without user, password, query and fragment."""
    import re

    return re.sub(_MESSAGE_URL_USER, r"\1", url.partition("?")[0].partition("#")[0])


def plain_query(query: str) -> str:
    """Messages: what of a store URL's query tells objects apart: all but signatures and tokens,
    which change."""
    import re

    return "&".join(
        p for p in query.split("&") if p and not re.fullmatch(_QUERY_NAME, p.partition("=")[0])
    )
