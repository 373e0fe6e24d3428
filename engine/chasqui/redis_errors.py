"""redis-py's exceptions and the server's error replies -> ours, in one place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import redis.exceptions as rx

from chasqui.address import Address
from chasqui.errors import (
    AuthFailed,
    ChasquiError,
    ConnectionLost,
    OutOfMemory,
    ReadOnlyServer,
    RedisError,
    ServerError,
)
from chasqui.protocol.flow import Refusal
from chasqui.protocol.produce import PASSING
from chasqui.protocol.slots import REDIRECTIONS

# redis-py strips the code off the errors that it has classes for.
_CODES: list[tuple[type[Exception], str]] = [
    (rx.NoScriptError, "NOSCRIPT"),
    (rx.ExecAbortError, "EXECABORT"),
    (rx.ReadOnlyError, "READONLY"),
    (rx.OutOfMemoryError, "OOM"),
    (rx.NoPermissionError, "NOPERM"),
    (rx.AuthenticationError, "NOAUTH"),
    (rx.BusyLoadingError, "LOADING"),
    (rx.ClusterDownError, "CLUSTERDOWN"),
    (rx.TryAgainError, "TRYAGAIN"),
    (rx.MovedError, "MOVED"),
    (rx.AskError, "ASK"),
]


# What a command inside a script was refused with: the script's own words to Redis before 7.0.
_IN_SCRIPT = re.compile(r"Error running script \(call to f_[0-9a-f]{40}\): (?:@user_script: ?[0-9]+: )+-?([A-Z]+) ")


def refusal_of(error: Exception) -> Refusal:
    text = str(error)
    inside = _IN_SCRIPT.search(text)
    if inside:
        return Refusal(inside[1], text[inside.end() :])
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Refusal(code, text.removeprefix(f"{code} "))
    code, _, rest = text.partition(" ")
    return Refusal(code, rest) if code.isupper() and code.isalpha() else Refusal("ERR", text)


def reply_in(error: rx.ConnectionError) -> Exception:
    """Some error replies are connection errors to redis-py, which has closed the connection by now: the reply they were
    counts for the whole step. Anything else is what it says.
    """
    if isinstance(error, rx.BusyLoadingError | rx.AuthenticationError):
        return refusal_of(error)
    if "previous master is now a slave" in str(error):
        return Refusal("READONLY", "the primary became a replica")
    return error


def connection_lost(error: BaseException, address: Address, *, sent: bool) -> RedisError:
    if isinstance(error, rx.AuthenticationError):
        return AuthFailed(
            f"{address.shown} refuses the user or password of the url ({_calm(error)}); check both, and the ACL"
        )
    how = "gave no answer" if sent else "cannot be reached"
    after = " The command had been sent, and may have been carried out." if sent else ""
    if not sent and address.shown.startswith("rediss") and isinstance(error, rx.TimeoutError | TimeoutError):
        after = " A port without TLS is silent to rediss://; redis:// is for those."
    return ConnectionLost(f"{address.shown} {how}: {type(error).__name__} {_calm(error)}.{after}".strip(), sent=sent)


def told(lost: ConnectionLost, *, sent: bool) -> ConnectionLost:
    """The last try may not have left, but an earlier one did."""
    if lost.sent or not sent:
        return lost
    return ConnectionLost(f"{lost.message} An earlier try had been sent, and may have been carried out.", sent=True)


def _calm(error: BaseException) -> str:
    return str(error).strip().rstrip(".")[:200]


@contextmanager
def translated(address: Address) -> Iterator[None]:
    """Errors of the server, as ours."""
    try:
        yield
    except Refusal as refusal:
        raise typed(refusal, address) from None
    except ChasquiError as error:
        if isinstance(error.__cause__, Refusal):
            error.__cause__ = typed(error.__cause__, address)
        raise
    except rx.AuthenticationError as error:
        raise connection_lost(error, address, sent=False) from None
    except rx.RedisError as error:
        raise ServerError(f"{address.shown}: {type(error).__name__} {_calm(error)}") from None


def typed(refusal: Refusal, address: Address) -> RedisError:
    """An error reply, as ours."""
    said = f"{refusal.code} {refusal.text}"[:300]
    if "cluster support disabled" in refusal.text:
        return ServerError(f"{address.shown} is no cluster; its url starts with redis://, without +cluster")
    if refusal.code in ("NOAUTH", "WRONGPASS", "NOPERM", "ACL") or any(
        words in refusal.text for words in ("executing the script can't run", "unauthenticated")
    ):
        return AuthFailed(f"{address.shown} does not allow this user the command ({said}); check the url and the ACL")
    if refusal.code == "READONLY":
        return ReadOnlyServer(f"{address.shown} is a read-only replica ({said}); give the url of the primary")
    if refusal.code in REDIRECTIONS and address.kind != "cluster":
        return ServerError(f"{address.shown} is a node of a cluster ({said}); its url starts with redis+cluster://")
    if refusal.code in PASSING:
        return ConnectionLost(f"{address.shown} is not ready ({said}); try again later")
    if refusal.code == "OOM":
        return OutOfMemory(f"{address.shown} refuses writes ({said}); free memory or raise maxmemory, see its log")
    return ServerError(f"{address.shown} answered {said}")
