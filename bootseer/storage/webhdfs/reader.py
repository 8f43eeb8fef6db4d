"""Reading objects of HDFS: from which DataNode, and the checks on every response."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.errors import BootseerError, CorruptDataError, StoreUnavailableError
from bootseer.storage.hdfs.remote_exceptions import from_remote_exception, is_standby
from bootseer.storage.http.errors import ShortBodyError
from bootseer.storage.http.exchange import Exchange, report_empty
from bootseer.storage.http.responses import (
    REDIRECTS,
    Headers,
    Target,
    origin_of,
    parse_retry_after,
    resolve_location,
    response_error,
)
from bootseer.storage.request_control import Attempt
from bootseer.storage.retry import retry_call
from bootseer.storage.store import check_limit, truncated_error
from bootseer.storage.webhdfs.client import Client
from bootseer.storage.webhdfs.namespace import Namespace
from bootseer.storage.webhdfs.protocol import (
    Parameters,
    at_datanode,
    parse_remote_exception,
    request_path,
    reusable_parameters,
)

ERROR_BYTES = 64 << 10
REUSE_S = 600.0  # a redirect's token lives for a day; a NameNode that moved shows sooner


class Reusable(NamedTuple):
    """Parameters of a redirect that serve requests to any DataNode, and until when."""

    parameters: Parameters
    until_s: float

    def __repr__(self) -> str:
        return "Reusable(…)"


class Reader:
    """Reads below one folder; any number of threads may use it."""

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client, self._namespace = client, namespace
        self._reusable: Reusable | None = None

    def read_scatter(
        self,
        name: str,
        offset: int,
        buffers: Sequence[memoryview],
        attempt: Attempt,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """As `Store.read_scatter`."""
        self._client.data_path(name)
        shown = f"{name} in {self._client.url}"
        what = f"read {shown}"
        if report_empty(buffers, filled):
            return
        total = sum(map(len, buffers))
        span = [("offset", str(offset)), ("length", str(total))]
        with self._open(name, span, attempt, what) as exchange:
            if exchange.length is not None and exchange.length < total:
                raise truncated_error(shown, offset + exchange.length, offset + total)
            if exchange.length is not None and exchange.length > total:
                raise StoreUnavailableError(
                    f"cannot {what}: {exchange.authority} sends {exchange.length} bytes where"
                    f" {total} were asked for"
                )
            try:
                exchange.fill(buffers, filled)
                exchange.expect_end(total)
            except ShortBodyError as error:
                raise self._short_body_error(name, offset, attempt, error) from error

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """As `Store.read`."""
        self._client.data_path(name)
        what = f"read {name} in {self._client.url}"

        def once() -> bytes:
            with self._open(name, [], self._client.attempt(), what) as exchange:
                check_limit(f"{name} in {self._client.url}", exchange.length or 0, limit_bytes)
                return exchange.read_all(limit_bytes)

        return retry_call(once, retry_s=self._client.options.retry_s)

    def _open(self, name: str, span: Parameters, attempt: Attempt, what: str) -> Exchange:
        """A DataNode's response that holds the bytes; the caller closes it."""
        target, reused = self._target(name, span, attempt, what)
        exchange = self._fetch(target, attempt, what)
        try:
            if exchange.status == 200:
                return exchange
            error = self._refusal(exchange, what)
        except BaseException:  # the caller has no exchange to close
            exchange.close()
            raise
        exchange.close()
        if reused is None or isinstance(error, CorruptDataError):
            raise error
        # The parameters of an earlier redirect may be too old: the cluster was restarted, upgraded
        # or failed over, or our token changed. The NameNode is asked again, now or by a later
        # attempt.
        if self._reusable is reused:  # not those that another thread has learned since
            self._reusable = None
        if error.retryable:
            raise error
        target = self._ask(name, span, attempt, what)
        exchange = self._fetch(target, attempt, what)
        if exchange.status == 200:
            return exchange
        with exchange:
            raise self._refusal(exchange, what)

    def _fetch(self, target: Target, attempt: Attempt, what: str) -> Exchange:
        for _ in range(3):
            exchange = self._client.pool.request(
                target.origin, "GET", target.request, attempt=attempt, what=what
            )
            if exchange.status not in REDIRECTS:
                break
            with exchange:
                target = resolve_location(target, exchange.headers.get("Location"), what)
        return exchange

    def _target(
        self, name: str, span: Parameters, attempt: Attempt, what: str
    ) -> tuple[Target, Reusable | None]:
        """Where to read, and the parameters that spared a question to the NameNode, if any did."""
        reusable = self._reusable
        if not attempt.prefer or attempt.prefer in attempt.avoid:
            return self._ask(name, span, attempt, what), None
        if reusable is None or reusable.until_s < time.monotonic():
            return at_datanode(self._ask(name, span, attempt, what), attempt.prefer), None
        request = request_path(self._client.path(name), "OPEN", [*reusable.parameters, *span])
        return Target(origin_of(self._client.namenodes.tls, attempt.prefer), request), reusable

    def _ask(self, name: str, span: Parameters, attempt: Attempt, what: str) -> Target:
        """Have the NameNode choose among the DataNodes that are not to be avoided."""
        avoid = [self._client.data_address(a) for a in sorted(attempt.avoid)]
        if avoid:
            excluded = [*span, ("excludedatanodes", ",".join(avoid))]
            try:
                return self._redirect(name, excluded, attempt, what)
            except StoreUnavailableError:
                pass  # the NameNode fails so when every replica is to be avoided
        return self._redirect(name, span, attempt, what)

    def _redirect(self, name: str, span: Parameters, attempt: Attempt, what: str) -> Target:
        if attempt.cancelled:
            raise StoreUnavailableError(f"cannot {what}: it was given up")
        target = self._client.namenodes.redirect(
            "GET", self._client.path(name), "OPEN", span, what, stall_s=attempt.stall_s
        )
        parameters = reusable_parameters(target)
        if any(k == "namenoderpcaddress" for k, _ in parameters):
            self._reusable = Reusable(parameters, time.monotonic() + REUSE_S)
        return target

    def _refusal(self, exchange: Exchange, what: str) -> BootseerError:
        body = exchange.read_all(ERROR_BYTES)
        remote = parse_remote_exception(body)
        if remote is not None and is_standby(remote):
            self._reusable = None
        return refusal_error(
            exchange.status, exchange.reason, exchange.headers, exchange.authority, body, what
        )

    def _short_body_error(
        self, name: str, offset: int, attempt: Attempt, error: ShortBodyError
    ) -> BootseerError:
        """The error of a body that was cut off, as DataNodes do with that of a damaged block."""
        if attempt.cancelled:
            return error
        at = offset + attempt.received_bytes
        try:
            blocks = self._namespace.blocks(name)
        except BootseerError:
            return error  # the NameNode cannot say: `error` stays what it is
        if any(b.corrupt and b.offset <= at < b.offset + b.length for b in blocks):
            return CorruptDataError(
                f"{name} in {self._client.url} is damaged at byte {at}: every replica of"
                " that block fails its checksum; restore it from another copy"
            )
        return error


def refusal_error(
    status: int, reason: str, headers: Headers, authority: str, body: bytes, what: str
) -> BootseerError:
    """Our error for a DataNode's response that refuses a request."""
    remote = parse_remote_exception(body)
    if remote is None:
        return response_error(status, reason, headers, authority, what)
    if is_standby(remote):
        return StoreUnavailableError(f"cannot {what}: the NameNode went on stand-by")
    return from_remote_exception(remote, what, retry_after_s=parse_retry_after(headers))
