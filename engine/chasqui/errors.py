"""Every error a user can catch, under one root.

    ChasquiError
    ├── ConfigError (also ValueError)     CMQ-004  an argument or option is wrong; nothing was sent
    │   ├── OptionError                   CMQ-004  an option: unknown, or its value does not fit
    │   └── CronError                     CMQ-004  a cron expression or time zone
    │       └── NoFutureFire              CMQ-004  the pattern is valid, but never fires again
    ├── PayloadError (also ValueError)    CMQ-002  a value that MessagePack cannot hold, or too large
    ├── DecodeError (also ValueError)     CMQ-003  bytes that are not what they should be
    ├── RedisError                        CMQ-001  the server, or the way to it
    │   ├── ConnectionLost                CMQ-001  unreachable, not ready, or lost before the reply came
    │   ├── AuthFailed                    CMQ-001  user, password or ACL refuse us
    │   ├── ReadOnlyServer                CMQ-001  we talk to a replica
    │   ├── OutOfMemory                   CMQ-001  maxmemory reached
    │   └── ServerError                   CMQ-001  any other error reply
    │       └── WrongKeyType              CMQ-001  under the name of a queue stands something that is none
    ├── QueueFull                         CMQ-301  max_stream_len reached; nothing was added
    ├── BulkInterrupted                   CMQ-302  part of a bulk was acknowledged; says which
    ├── EmbeddedServerError               CMQ-303  the embedded server could not be started
    ├── StageExpired                      CMQ-304  staged rows are gone before they were published; run the batch again
    ├── LedgerAhead                       CMQ-305  the ledger knows a higher version than the one being written
    ├── LedgerBroken                      CMQ-306  the server has lost rows or a ledger that it had confirmed
    ├── CheckpointInUse                   CMQ-307  another driver runs the same checkpoint, or took it over
    ├── DataLoss                          CMQ-308  entries that a reader had yet to see are gone
    ├── ResultTimeout (also TimeoutError) CMQ-102  wait_for_result ran out of time
    └── HandlerError                      CMQ-010  raised by handlers to steer the outcome
        ├── UnrecoverableError            CMQ-011  do not retry: dead letter now
        └── RetryLater                    CMQ-012  retry after a delay of the handler's choice

Codes below 300 are ChasquiMQ's own; those above are this engine's. A code never changes its meaning.
Errors cross process borders (Spark executors), so all of them pickle with their attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any


class ChasquiError(Exception):
    """Root of all errors of this package."""

    code = "CMQ-000"

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        """The text without the code."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[ChasquiError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ChasquiError:
    # Not through __init__: subclasses have signatures of their own.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ConfigError(ChasquiError, ValueError):
    """An argument is wrong; nothing was sent to the server."""

    code = "CMQ-004"


class OptionError(ConfigError):
    """An option is unknown, or its value does not fit."""


class CronError(ConfigError):
    """A cron expression or a time zone that cannot be understood."""


class NoFutureFire(CronError):
    """The pattern is well formed, but there is no later moment that it matches."""


class PayloadError(ChasquiError, ValueError):
    """A payload that MessagePack cannot hold, or that is larger than ``max_payload_bytes``."""

    code = "CMQ-002"


class DecodeError(ChasquiError, ValueError):
    """Bytes from the server, or from another program, that are not a job, a spec or a payload."""

    code = "CMQ-003"


class RedisError(ChasquiError):
    """The server answered with an error, or did not answer."""

    code = "CMQ-001"


class ConnectionLost(RedisError):
    """The server cannot be reached, says that it is not ready, or the connection broke.

    ``sent`` tells whether the command had left before it broke: then it may have been carried out.
    """

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class AuthFailed(RedisError):
    """Wrong user or password, or an ACL that does not allow the command."""


class ReadOnlyServer(RedisError):
    """The server is a read-only replica."""


class OutOfMemory(RedisError):
    """The server has reached ``maxmemory`` and refuses writes."""


class ServerError(RedisError):
    """Any other error reply of the server."""


class WrongKeyType(ServerError):
    """Under the name of a queue stands something that is none."""


class QueueFull(ChasquiError):
    """The stream holds ``max_stream_len`` jobs; nothing of this call was added, unless it says so."""

    code = "CMQ-301"


class BulkInterrupted(ChasquiError):
    """A bulk stopped half way.

    ``added``: the ids of the jobs that the server has confirmed; ``acknowledged`` is their number.
    ``unknown``: how many after those were on the way, and may or may not have been added.
    ``ids``: the ids of all jobs of the call, in order. The cause is in ``__cause__``.
    """

    code = "CMQ-302"

    def __init__(self, message: str, *, added: Sequence[str], unknown: int, ids: Sequence[str]) -> None:
        super().__init__(message)
        self.added = list(added)
        self.acknowledged = len(self.added)
        self.unknown = unknown
        self.ids = list(ids)


class EmbeddedServerError(ChasquiError):
    """The embedded server is not installed, or did not start."""

    code = "CMQ-303"


class StageExpired(ChasquiError):
    """Rows of a batch were staged, and are gone before the batch was opened: nothing of it is published."""

    code = "CMQ-304"


class LedgerAhead(ChasquiError):
    """A writer offers a version that is lower than the last one: a checkpoint was deleted, restored or copied."""

    code = "CMQ-305"


class LedgerBroken(ChasquiError):
    """What a ledger had adopted is not there any more, or two ledgers of one writer contradict each other."""

    code = "CMQ-306"


class CheckpointInUse(ChasquiError):
    """Another driver takes jobs for the same checkpoint, or has taken it over while this one was silent."""

    code = "CMQ-307"


class DataLoss(ChasquiError):
    """Entries that a query had yet to read are gone."""

    code = "CMQ-308"


class ResultTimeout(ChasquiError, TimeoutError):
    """No result came in time."""

    code = "CMQ-102"


class HandlerError(ChasquiError):
    """Raised inside a handler to steer what becomes of the job."""

    code = "CMQ-010"


class UnrecoverableError(HandlerError):
    """Raised by a handler: do not retry, move the job to the dead letters at once."""

    code = "CMQ-011"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class RetryLater(HandlerError):
    """Raised by a handler: run this job again after ``delay_ms`` (or a timedelta), whatever its backoff says."""

    code = "CMQ-012"

    def __init__(self, delay_ms: int | timedelta, message: str = "") -> None:
        super().__init__(message or f"retry asked for in {delay_ms} ms")
        self.delay_ms = delay_ms
