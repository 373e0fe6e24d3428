"""Every key of a queue, and the rules for the names that go into them."""

from __future__ import annotations

from typing import Any

from chasqui.errors import ConfigError
from chasqui.job import MAX_ID_BYTES, MAX_NAME_BYTES

MAX_QUEUE_BYTES = 256
MAX_APP_BYTES = 512


class Keys:
    """The keys of one queue. They share the hash tag ``{chasqui:<queue>}``: one queue lives in one cluster slot."""

    def __init__(self, queue: str) -> None:
        self.queue = checked_queue(queue)
        self.prefix = f"{{chasqui:{queue}}}"
        self.stream = f"{self.prefix}:stream"
        self.delayed = f"{self.prefix}:delayed"
        self.dlq = f"{self.prefix}:dlq"
        self.events = f"{self.prefix}:events"
        self.repeat = f"{self.prefix}:repeat"
        self.paused = f"{self.prefix}:paused"
        self.promoter_lock = f"{self.prefix}:promoter:lock"
        self.scheduler_lock = f"{self.prefix}:scheduler:lock"

    @property
    def standing(self) -> tuple[str, ...]:
        """The keys that a queue has once, whatever its jobs."""
        return (
            *(self.stream, self.delayed, self.dlq, self.events, self.repeat, self.paused),
            *(self.promoter_lock, self.scheduler_lock),
        )

    def result(self, job_id: str) -> str:
        return f"{self.prefix}:result:{job_id}"

    def dedup(self, job_id: str) -> str:
        """The marker that makes an id unique; also what native delayed adds look at."""
        return f"{self.prefix}:dlid:{job_id}"

    def delayed_index(self, job_id: str) -> str:
        return f"{self.prefix}:didx:{job_id}"

    def repeat_spec(self, spec_key: str) -> str:
        return f"{self.prefix}:repeat:spec:{spec_key}"

    def stage(self, stage_id: str) -> str:
        """Encoded jobs that one attempt of one task has set down, not yet visible."""
        return f"{self.prefix}:stage:{stage_id}"

    def ledger(self, app_id: str) -> str:
        """How far a writer's version is published in this queue."""
        return f"{self.prefix}:txn:{app_id}"

    def replay_pace(self, pace_id: str) -> str:
        """When the next of those who put dead letters back together may go on."""
        return f"{self.prefix}:replay:{pace_id}:pace"

    def spark_session(self, sid: str) -> str:
        """Who drives the Spark checkpoint of that sid, and how its jobs are settled."""
        return f"{self.prefix}:spark:{sid}:session"

    def spark_manifest(self, sid: str, seq: int) -> str:
        """The jobs of one of its batches."""
        return f"{self.prefix}:spark:{sid}:batch:{seq}"


class AppKeys:
    """The keys of one transactional writer that are no queue's; one cluster slot of their own."""

    def __init__(self, app_id: str) -> None:
        self.app_id = checked_app_id(app_id)
        self.prefix = f"{{chasqui-txn:{app_id}}}"
        self.home = f"{self.prefix}:txn"
        self.queues = f"{self.prefix}:queues"

    def manifest(self, manifest_id: str) -> str:
        return f"{self.prefix}:manifest:{manifest_id}"


def _utf8(what: str, value: Any, limit: int) -> bytes:
    if not isinstance(value, str):
        raise ConfigError(f"{what} expects text, got {type(value).__name__}")
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{what} holds characters that UTF-8 cannot write (a lone surrogate): {value!r:.80}"
        ) from None
    if len(data) > limit:
        raise ConfigError(f"{what} takes at most {limit} bytes of UTF-8, got {len(data)}: shorten it")
    return data


def checked_queue(queue: Any) -> str:
    """A queue's name: not empty, without braces (they delimit the cluster's hash tag) and control characters."""
    _utf8("queue", queue, MAX_QUEUE_BYTES)
    if not queue.strip() or any(c in "{}" or ord(c) < 32 or ord(c) == 127 for c in queue):
        raise ConfigError(f"queue expects a name without braces and control characters, not blank; got {queue!r:.80}")
    return str(queue)


def checked_app_id(app_id: Any) -> str:
    """A transactional writer's name: as a queue's, it stands inside a hash tag."""
    _utf8("txn_app_id", app_id, MAX_APP_BYTES)
    if not app_id.strip() or any(c in "{}" or ord(c) < 32 or ord(c) == 127 for c in app_id):
        raise ConfigError(
            f"txn_app_id expects a name without braces and control characters, not blank; got {app_id!r:.80}"
        )
    return str(app_id)


def name_bytes(name: Any) -> bytes:
    """A job's name in UTF-8, which is empty for unnamed jobs."""
    return _utf8("name", name, MAX_NAME_BYTES)


def id_bytes(job_id: Any) -> bytes:
    """A job id that a caller chose, in UTF-8."""
    data = _utf8("id", job_id, MAX_ID_BYTES)
    if not str(job_id).strip():
        raise ConfigError(f"id expects text that is not blank, got {job_id!r}; leave it out to have one made")
    return data
