"""Authorization for registries: Basic, and Bearer tokens that are renewed as they are used.

A login is sent to the server that it is for, and to the token service which that server names;
never where a redirect leads. A token is renewed from its source (file, helper, service) when its
life is nearly over and when the server refuses it; of all threads that need one, one asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlencode, urlsplit

from bootseer import light_dataclasses as dataclasses
from bootseer.errors import AccessDeniedError, StoreUnavailableError
from bootseer.storage.http.exchange import Exchange
from bootseer.storage.http.pool import Pool
from bootseer.storage.http.responses import Origin
from bootseer.storage.oci.manifest import parse_object
from bootseer.storage.oci.registry.challenge import (
    Challenge,
    first_of,
    merge_scopes,
    token_life_s,
    use_until_s,
)
from bootseer.storage.oci.registry.logins import IDENTITY_USER, Login, basic_header
from bootseer.storage.oci.registry.mirrors import Endpoint, is_loopback
from bootseer.storage.request_control import Attempt

TOKEN_LIMIT_BYTES = 1 << 20
CLIENT_ID = "bootseer"
WAIT_FOR_OTHERS_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Grant:
    """A header, until when on the monotonic clock it is sent, and how another is obtained."""

    header: str = dataclasses.field(repr=False)
    until_s: float
    challenge: Challenge


class _Renewal:
    """A grant that one thread obtains and others wait for."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._grant: _Grant | None = None
        self._error: BaseException | None = None

    def end(self, grant: _Grant | None, error: BaseException | None) -> None:
        self._grant, self._error = grant, error
        self._over.set()

    def wait(self, endpoint: Endpoint) -> _Grant:
        """The grant; a failure is raised as an error of the waiter's own."""
        if not self._over.wait(WAIT_FOR_OTHERS_S):
            raise StoreUnavailableError(f"the login at {endpoint.authority} takes too long")
        if self._grant is not None:
            return self._grant
        if isinstance(self._error, AccessDeniedError):
            raise AccessDeniedError(str(self._error))
        raise StoreUnavailableError(f"the login at {endpoint.authority} failed: {self._error}")


_Key = tuple[Origin, str, tuple[str, ...]]


class Authorizer:
    """Authorization headers for endpoints and scopes; any number of threads may use one."""

    def __init__(
        self, pool_for: Callable[[Endpoint], Pool], login_for: Callable[[Endpoint], Login]
    ) -> None:
        self._pool_for, self._login_for = pool_for, login_for
        self._lock = threading.Lock()
        self._grants: dict[_Key, _Grant] = {}
        self._challenges: dict[_Key, Challenge] = {}
        self._renewals: dict[_Key, _Renewal] = {}

    def header(self, endpoint: Endpoint, scopes: tuple[str, ...], attempt: Attempt) -> str:
        """The header to send first, "" when none is known yet; renewed when it is old."""
        key = _key(endpoint, scopes)
        with self._lock:
            grant = self._grants.get(key)
        if grant is None:
            return ""
        if grant.until_s > time.monotonic():
            return grant.header
        return self._renew(endpoint, key, grant.challenge, grant.header, attempt).header

    def answer_refusal(
        self,
        endpoint: Endpoint,
        scopes: tuple[str, ...],
        challenges: Sequence[Challenge],
        sent: str,
        attempt: Attempt,
    ) -> str:
        """The header to send after a refusal of `sent`; AccessDeniedError when there is none.

        Without challenges (a 403, say) the one known from before is answered again.
        """
        key = _key(endpoint, scopes)
        with self._lock:
            grant = self._grants.get(key)
            if grant is not None and grant.header == sent:
                del self._grants[key]
            known = self._challenges.get(key)  # it outlives a grant that another thread drops
        if grant is not None and grant.header != sent:
            return grant.header  # another thread renewed it meanwhile
        chosen = first_of(challenges, "bearer") or first_of(challenges, "basic")
        chosen = chosen or known
        if chosen is None:
            raise AccessDeniedError(
                f"the registry {endpoint.authority} refuses us and offers no way to log in that"
                " we know (Basic, Bearer)"
            )
        return self._renew(endpoint, key, chosen, sent, attempt).header

    def _renew(
        self, endpoint: Endpoint, key: _Key, challenge: Challenge, old: str, attempt: Attempt
    ) -> _Grant:
        """Another grant than `old`, which one thread obtains for all."""
        with self._lock:
            known = self._grants.get(key)
            if known is not None and known.header != old:
                return known  # another thread renewed it meanwhile
            renewal = self._renewals.get(key)
            leads = renewal is None
            if renewal is None:
                renewal = self._renewals[key] = _Renewal()
        if not leads:
            return renewal.wait(endpoint)
        try:
            grant = self._obtain(endpoint, key[2], challenge, attempt)
        except BaseException as error:  # the threads that wait for this token get it too
            with self._lock:
                del self._renewals[key]
            renewal.end(None, error)
            raise
        with self._lock:
            self._grants[key], self._challenges[key] = grant, challenge
            del self._renewals[key]
        renewal.end(grant, None)
        return grant

    def _obtain(
        self, endpoint: Endpoint, scopes: tuple[str, ...], challenge: Challenge, attempt: Attempt
    ) -> _Grant:
        login = self._login_for(endpoint)
        if challenge.scheme == "basic" or login.registry_token:
            header = f"Bearer {login.registry_token}" if login.registry_token else login.basic
            if not header:
                raise AccessDeniedError(_wants_login(endpoint, login))
            return _Grant(header, float("inf"), challenge)
        asked_s = time.monotonic()
        service = _TokenService(endpoint, challenge, self._pool_for(endpoint), attempt)
        token, life_s = service.get_token(login, scopes)
        return _Grant(f"Bearer {token}", use_until_s(asked_s, life_s), challenge)


class _TokenService:
    """The token service that a challenge names; AccessDeniedError when it names none."""

    def __init__(
        self, endpoint: Endpoint, challenge: Challenge, pool: Pool, attempt: Attempt
    ) -> None:
        parts = urlsplit(challenge.fields.get("realm", ""))
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        self._what = f"log in at {endpoint.authority}"
        plain = parts.path + parts.query
        if parts.scheme not in ("http", "https") or not host or not _is_plain(plain):
            raise AccessDeniedError(
                f"cannot {self._what}: it names no token service that can be used"
            )
        tls = parts.scheme == "https"
        self.origin = Origin(tls, host, port or (443 if tls else 80))
        self._may_know_login = tls or not endpoint.origin.tls or is_loopback(host)
        self._path, self._query = parts.path or "/", parts.query
        self._service = challenge.fields.get("service", "")
        self._scope = challenge.fields.get("scope", "")
        self._endpoint, self._pool, self._attempt = endpoint, pool, attempt

    def get_token(self, login: Login, scopes: tuple[str, ...]) -> tuple[str, float]:
        """A token and its life in seconds."""
        if login and not self._may_know_login:
            raise AccessDeniedError(
                f"cannot {self._what}: its token service speaks plain http, which is not told a"
                " password; let it speak https"
            )
        merged = merge_scopes((*scopes, self._scope))
        if login.identity_token:
            with self._post(login, merged) as exchange:
                if exchange.status not in (404, 405):
                    return self._parse(exchange, login)
        with self._get(login, merged) as exchange:
            return self._parse(exchange, login)

    def _post(self, login: Login, scopes: tuple[str, ...]) -> Exchange:
        fields = {
            "grant_type": "refresh_token",
            "service": self._service,
            "client_id": CLIENT_ID,
            "scope": " ".join(scopes),
            "refresh_token": login.identity_token,
        }
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        target = self._path + (f"?{self._query}" if self._query else "")
        return self._request("POST", target, headers, urlencode(fields).encode())

    def _get(self, login: Login, scopes: tuple[str, ...]) -> Exchange:
        fields = [("service", self._service)] if self._service else []
        fields += [("scope", scope) for scope in scopes]
        fields.append(("client_id", CLIENT_ID))
        header = login.basic
        if login.identity_token:
            header = basic_header(login.user or IDENTITY_USER, login.identity_token)
        elif header:
            fields.append(("account", login.user))
        query = "&".join(part for part in (self._query, urlencode(fields)) if part)
        return self._request(
            "GET", f"{self._path}?{query}", {"Authorization": header} if header else {}, None
        )

    def _request(
        self, method: str, target: str, headers: dict[str, str], body: bytes | None
    ) -> Exchange:
        attempt = Attempt(stall_s=self._attempt.stall_s)
        return self._pool.request(
            self.origin,
            method,
            target,
            attempt=attempt,
            what=self._what,
            headers=headers,
            body=body,
        )

    def _parse(self, exchange: Exchange, login: Login) -> tuple[str, float]:
        if exchange.status in (400, 401, 403):
            raise AccessDeniedError(_wants_login(self._endpoint, login))
        if exchange.status != 200:
            raise exchange.status_error()
        what = f"the answer of the token service of {self._endpoint.authority}"
        answer = parse_object(exchange.read_all(TOKEN_LIMIT_BYTES), what)
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise AccessDeniedError(f"cannot {self._what}: its token service gave no token")
        return token, token_life_s(answer)


def _is_plain(text: str) -> bool:
    """Whether a text can stand in a request line."""
    return text.isascii() and text.isprintable() and " " not in text


def _wants_login(endpoint: Endpoint, login: Login) -> str:
    if login:
        known = f"refuses the login of {login.user or 'the identity token'}; log in anew"
    elif login.trouble:
        known = f"wants a login, and {login.trouble}"
    else:
        known = f"wants a login; log in with `podman login {endpoint.host}` or docker's"
    return f"the registry {endpoint.authority} {known}"


def _key(endpoint: Endpoint, scopes: tuple[str, ...]) -> _Key:
    return endpoint.origin, endpoint.host, merge_scopes(scopes)
