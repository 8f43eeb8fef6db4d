"""Challenges of registries that refuse a request, and the scopes and lives of tokens. Pure.

Sources: RFC 9110 §11.6 (WWW-Authenticate), the distribution project's token specification.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from bootseer import light_dataclasses as dataclasses

DEFAULT_LIFE_S = 60.0  # of a token that does not say how long it lives
LONGEST_LIFE_S = 24 * 3600.0
EARLY_S = 10.0
EARLY_SHARE = 0.25

# Compiled when a registry asks for a login: other starts need not wait for that.
_SCHEME = r"\s*([A-Za-z][A-Za-z0-9-]*)(?:\s+|$)"
_FIELD = r'\s*([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s",]*))\s*(?:,|$)'


@dataclasses.dataclass(frozen=True, slots=True)
class Challenge:
    """One way to log in; `scheme` in lower case."""

    scheme: str
    fields: Mapping[str, str]


def parse_challenges(headers: Iterable[str]) -> list[Challenge]:
    """Take WWW-Authenticate headers apart; several challenges may share one header."""
    challenges = []
    for text in headers:
        at = 0
        scheme, one_field = re.compile(_SCHEME), re.compile(_FIELD)
        while match := scheme.match(text, at):
            at = match.end()
            fields: dict[str, str] = {}
            while field := one_field.match(text, at):
                name, quoted, bare = field.groups()
                value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else bare
                fields.setdefault(name.lower(), value)
                at = field.end()
            challenges.append(Challenge(match[1].lower(), fields))
            skipped = re.match(r"[\s,]*", text[at:])
            at += skipped.end() if skipped else 0
    return challenges


@functools.lru_cache(maxsize=256)  # each request asks for the same
def merge_scopes(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Scopes with the actions of each resource merged, sorted: one spelling for a cache's key."""
    actions: dict[str, set[str]] = {}
    for scope in " ".join(scopes).split():
        resource, _, wanted = scope.rpartition(":")
        if resource:
            actions.setdefault(resource, set()).update(part for part in wanted.split(",") if part)
    return tuple(f"{name}:{','.join(sorted(words))}" for name, words in sorted(actions.items()))


@functools.lru_cache(maxsize=256)
def pull_scope(repository: str, *, push: bool = False) -> str:
    """The right to read a repository, and to write it."""
    return f"repository:{repository}:pull{',push' if push else ''}"


def delete_scope(repository: str) -> str:
    """The right to delete manifests of a repository."""
    return f"repository:{repository}:delete"


def token_life_s(answer: Mapping[str, object]) -> float:
    """Seconds that a token is valid for, by the token service's response."""
    life = answer.get("expires_in")
    if isinstance(life, int | float) and not isinstance(life, bool) and life > 0:
        return min(float(life), LONGEST_LIFE_S)
    return DEFAULT_LIFE_S


def use_until_s(asked_s: float, life_s: float) -> float:
    """Until when a token is used: it is renewed early, so that none expires on its way."""
    return asked_s + life_s - min(EARLY_S, life_s * EARLY_SHARE)


def first_of(challenges: Sequence[Challenge], scheme: str) -> Challenge | None:
    """The first challenge of a scheme."""
    return next((one for one in challenges if one.scheme == scheme), None)
