"""Reading objects of HDFS: where to ask, and the checks on every answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.errors import (
    BootseerError,
    CorruptDataError,
    StoreUnavailableError,
)
from bootseer.storage.http.errors import ShortBodyError
from bootseer.storage.http.pool import Exchange
from bootseer.storage.http.responses import (
    REDIRECTS,
    Headers,
    Target,
    answer_error,
    origin_of,
    resolve,
    retry_after,
)
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retrying
from bootseer.storage.webhdfs.namenodes import Parameters
from bootseer.storage.webhdfs.namespace import Folder
from bootseer.storage.webhdfs.protocol import (
    at_datanode,
    is_standby,
    remote_error,
    remote_exception,
    request_path,
    reusable_parameters,
)

ERROR_BYTES = 64 << 10
WAY_S = 600.0  # a redirect's token lives for a day; a NameNode that moved shows sooner
HTTP_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "bootseer"}


class Way(NamedTuple):
    """What a redirect taught: parameters good for any DataNode, and until when."""

    parameters: tuple[tuple[str, str], ...]
    until_s: float

    def __repr__(self) -> str:
        return "Way(…)"


class Reader:
    """Reads below one folder; any number of threads may use it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._way: Way | None = None

    def scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        self._folder.data_path(name)
        what = f"read {name} in {self._folder.url}"
        total = sum(map(len, buffers))
        if not total:
            for number in range(len(buffers) if filled else 0):
                filled(number)  # type: ignore[misc]
            return
        span = [("offset", str(offset)), ("length", str(total))]
        with self._open(name, span, attempt, what) as exchange:
            if exchange.length is not None and exchange.length < total:
                raise CorruptDataError(
                    f"{name} in {self._folder.url} ends at byte {offset + exchange.length}, before"
                    f" {offset + total}; it is truncated"
                )
            if exchange.length is not None and exchange.length > total:
                raise StoreUnavailableError(
                    f"cannot {what}: {exchange.authority} sends {exchange.length} bytes where"
                    f" {total} were asked for"
                )
            try:
                exchange.fill(buffers, filled)
                exchange.expect_end(total)
            except ShortBodyError as error:
                raise self._why_short(name, offset, attempt, error) from error

    def whole(self, name: str, *, limit_bytes: int) -> bytes:
        self._folder.data_path(name)
        what = f"read {name} in {self._folder.url}"

        def once() -> bytes:
            with self._open(name, [], self._folder.attempt(), what) as exchange:
                if (exchange.length or 0) > limit_bytes:
                    raise CorruptDataError(
                        f"{name} in {self._folder.url} has {exchange.length} bytes, more than the"
                        f" {limit_bytes} it may have"
                    )
                return exchange.read_all(limit_bytes)

        return retrying(once, retry_s=self._folder.options.retry_s)

    def _open(self, name: str, span: Parameters, attempt: Attempt, what: str) -> Exchange:
        """A DataNode's answer that holds the bytes; the caller closes it."""
        target, way = self._target(name, span, attempt, what)
        exchange = self._fetch(target, attempt, what)
        try:
            if exchange.status == 200:
                return exchange
            error = self._refused(exchange, what)
        except BaseException:  # who asked never had it to close
            exchange.close()
            raise
        exchange.close()
        if way is None or isinstance(error, CorruptDataError):
            raise error
        # What an earlier redirect taught may be too old: the cluster was restarted or upgraded,
        # its NameNode or our token is another. The NameNode is asked again, now or by a later try.
        if self._way is way:  # and not what another thread has learned since
            self._way = None
        if error.retryable:
            raise error
        target = self._ask(name, span, attempt, what)
        exchange = self._fetch(target, attempt, what)
        if exchange.status == 200:
            return exchange
        with exchange:
            raise self._refused(exchange, what)

    def _fetch(self, target: Target, attempt: Attempt, what: str) -> Exchange:
        for _ in range(3):
            exchange = self._folder.pool.request(
                target.origin, "GET", target.request, headers=HTTP_HEADERS, attempt=attempt,
                what=what,
            )  # fmt: skip
            if exchange.status not in REDIRECTS:
                break
            with exchange:
                target = resolve(target, exchange.headers.get("Location"), what)
        return exchange

    def _target(
        self, name: str, span: Parameters, attempt: Attempt, what: str
    ) -> tuple[Target, Way | None]:
        """Where to read, and by what the NameNode was left out, if it was."""
        way = self._way
        if not attempt.prefer or attempt.prefer in attempt.avoid:
            return self._ask(name, span, attempt, what), None
        if way is None or way.until_s < time.monotonic():
            return at_datanode(self._ask(name, span, attempt, what), attempt.prefer), None
        request = request_path(self._folder.path(name), "OPEN", [*way.parameters, *span])
        return Target(origin_of(self._folder.names.tls, attempt.prefer), request), way

    def _ask(self, name: str, span: Parameters, attempt: Attempt, what: str) -> Target:
        """Let the NameNode choose among the DataNodes that are not to be avoided."""
        avoid = [self._folder.data_address(a) for a in sorted(attempt.avoid)]
        if avoid:
            excluded = [*span, ("excludedatanodes", ",".join(avoid))]
            try:
                return self._redirect(name, excluded, attempt, what)
            except StoreUnavailableError:
                pass  # every replica is to be avoided, which the NameNode calls a fault
        return self._redirect(name, span, attempt, what)

    def _redirect(self, name: str, span: Parameters, attempt: Attempt, what: str) -> Target:
        if attempt.cancelled:
            raise StoreUnavailableError(f"cannot {what}: it was given up")
        target = self._folder.names.redirect(
            "GET", self._folder.path(name), "OPEN", span, what, stall_s=attempt.stall_s
        )
        parameters = reusable_parameters(target)
        if any(k == "namenoderpcaddress" for k, _ in parameters):
            self._way = Way(parameters, time.monotonic() + WAY_S)
        return target

    def _refused(self, exchange: Exchange, what: str) -> BootseerError:
        body = exchange.read_all(ERROR_BYTES)
        remote = remote_exception(body)
        if remote is not None and is_standby(remote):
            self._way = None
        return refusal(
            exchange.status, exchange.reason, exchange.headers, exchange.authority, body, what
        )

    def _why_short(
        self, name: str, offset: int, attempt: Attempt, error: ShortBodyError
    ) -> BootseerError:
        """A DataNode cuts a body off when its block is damaged; the NameNode knows whether."""
        if attempt.cancelled:
            return error
        at = offset + attempt.received_bytes
        try:
            blocks = self._folder.blocks(name)
        except BootseerError:
            return error  # who cannot be asked changes nothing: it was short
        if any(b.corrupt and b.offset <= at < b.offset + b.length for b in blocks):
            return CorruptDataError(
                f"{name} in {self._folder.url} is damaged at byte {at}: every replica of"
                " that block fails its checksum; restore it from another copy"
            )
        return error


def refusal(
    status: int, reason: str, headers: Headers, authority: str, body: bytes, what: str
) -> BootseerError:
    """Our error for a DataNode's answer that is none of the good ones."""
    remote = remote_exception(body)
    if remote is None:
        return answer_error(status, reason, headers, authority, what)
    if is_standby(remote):
        return StoreUnavailableError(f"cannot {what}: the NameNode went on stand-by")
    return remote_error(remote, what, retry_after_s=retry_after(headers))
