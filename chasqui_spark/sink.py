"""ChasquiSink: exactly-once enqueue from inside ``foreachBatch``."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from chasqui import ConfigError, OptionError, RetryOverride
from chasqui.bridge import checked_app_id, spell
from chasqui_spark.datasource import FORMAT
from chasqui_spark.options import SinkOptions, resolved

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY, _RUN = "sql.streaming.queryId", "spark.jobGroup.id"
_REMEMBERED = 1000
# The last batch that was written under a name in a run of a query. Spark gives a run each batch once.
_written: dict[tuple[str, str], int] = {}


class ChasquiSink:
    """For ``df.writeStream.foreachBatch(ChasquiSink(queue="emails"))``, alone or beside other things done to a batch.

    ``queue``, ``name`` and ``retry`` are the jobs'; ``options`` are those of ``df.write.format("chasqui")``, in
    Python's spelling. Sinks of one query each need a ``sink_id`` of their own: it is part of the name under which
    versions are counted, and a second write under one name would be taken for the first one come again.

    The writer's name is ``txn_app_id``, or else the id of the query, which survives restarts; over Spark Connect the
    query's id cannot be seen, and ``txn_app_id`` is needed.

    >>> def both(batch, batch_id):
    ...     ChasquiSink(queue="emails", sink_id="mail")(batch.where("kind = 'mail'"), batch_id)
    ...     ChasquiSink(queue="sms", sink_id="sms")(batch.where("kind = 'sms'"), batch_id)
    """

    def __init__(
        self,
        *,
        queue: str | None = None,
        name: str | None = None,
        retry: RetryOverride | None = None,
        sink_id: str = "main",
        txn_app_id: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(sink_id, str) or not sink_id or "/" in sink_id:
            raise ConfigError(f"sink_id expects a name without a slash, got {sink_id!r:.80}")
        for mine in ("txn_version", "txn_older"):
            if mine in options:
                raise OptionError(f"{mine} is set by ChasquiSink: the version is the batch's number")
        if options.get("delivery") == "atLeastOnce":
            raise OptionError("ChasquiSink writes exactly once; for at-least-once use df.write.format('chasqui')")
        given = {"queue": queue, "name": name, **_retry_options(retry), **options}
        self._options = {spell(key, "spark"): value for key, value in given.items() if value is not None}
        # Checked here, where the mistake is, and not in the first batch; the url is settled on the driver.
        checked = resolved(SinkOptions, self._options)
        self._options["url"] = checked.url
        self._sink_id = sink_id
        self._app_id = None if txn_app_id is None else checked_app_id(txn_app_id)

    def __repr__(self) -> str:
        return f"ChasquiSink(queue={self._options.get('queue')!r}, sink_id={self._sink_id!r})"

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Write one batch. A batch that comes again, after a restart, is written once all the same."""
        if isinstance(batch_id, bool) or not isinstance(batch_id, int):
            raise ConfigError(f"batch_id expects the number that foreachBatch gives, got {batch_id!r:.80}")
        name = self._name(batch)
        run = _run_of(batch)
        if run is not None and _written.get((run, name)) == batch_id:
            raise ConfigError(
                f"batch {batch_id} was written as {name!r} before, by another sink or another call: its rows would be "
                f"taken for the first one's and dropped. Give each sink of a query a sink_id of its own"
            )
        writer = batch.write.format(FORMAT).mode("append")
        for option, value in self._options.items():
            writer = writer.option(option, value)
        writer.option("txnAppId", name).option("txnVersion", batch_id).option("txnOlder", "fail").save()
        if run is not None:
            _written[run, name] = batch_id
            for old in list(_written)[:-_REMEMBERED]:
                _written.pop(old, None)

    def _name(self, batch: DataFrame) -> str:
        base = self._app_id or _property(batch, _QUERY)
        if base is None:
            raise ConfigError(
                "ChasquiSink cannot see the id of the query here, as over Spark Connect: pass txn_app_id, a name of "
                "your own that stays the same when the query is started again"
            )
        return f"{base}/{self._sink_id}"


def _property(batch: DataFrame, name: str) -> str | None:
    """What Spark tells the streaming query's thread, which we are on; None where it does not tell."""
    context = getattr(batch.sparkSession, "_sc", None)
    found = None if context is None else context.getLocalProperty(name)
    return None if found is None else str(found)


def _run_of(batch: DataFrame) -> str | None:
    """The run of the query. It is the job group, unless the user has chosen one."""
    group = _property(batch, _RUN) or ""
    try:
        return str(uuid.UUID(group))
    except ValueError:
        return None


def _retry_options(retry: RetryOverride | None) -> dict[str, Any]:
    if retry is None:
        return {}
    if not isinstance(retry, RetryOverride):
        raise ConfigError(f"retry expects a RetryOverride, got {type(retry).__name__}")
    found: dict[str, Any] = {"max_attempts": retry.max_attempts}
    if retry.backoff is not None:
        for field in ("kind", "delay_ms", "max_delay_ms", "multiplier", "jitter_ms"):
            found[f"backoff_{field}"] = getattr(retry.backoff, field)
    return found
