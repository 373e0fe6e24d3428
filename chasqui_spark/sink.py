"""ChasquiSink: exactly-once enqueue from inside ``foreachBatch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chasqui import ConfigError, OptionError, RetryOverride
from chasqui.bridge import checked_app_id, spell
from chasqui_spark.datasource import FORMAT
from chasqui_spark.options import SinkOptions, resolved

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_QUERY = "sql.streaming.queryId"


class ChasquiSink:
    """For ``df.writeStream.foreachBatch(ChasquiSink(queue="emails"))``, alone or beside other things done to a batch.

    ``queue``, ``name`` and ``retry`` are the jobs'; ``options`` are those of ``df.write.format("chasqui")``, in
    Python's spelling. Sinks of one query each need a ``sink_id`` of their own: it is part of the name under which
    versions are counted, and two sinks of one name would each take the other's rows for their own.

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
        writer = batch.write.format(FORMAT).mode("append")
        for name, value in self._options.items():
            writer = writer.option(name, value)
        writer.option("txnAppId", self._name(batch)).option("txnVersion", batch_id).option("txnOlder", "fail").save()

    def _name(self, batch: DataFrame) -> str:
        base = self._app_id or _query_id(batch)
        if base is None:
            raise ConfigError(
                "ChasquiSink cannot see the id of the query here, as over Spark Connect: pass txn_app_id, a name of "
                "your own that stays the same when the query is started again"
            )
        return f"{base}/{self._sink_id}"


def _query_id(batch: DataFrame) -> str | None:
    """The id of the streaming query on whose thread we are; None where Spark does not tell."""
    context = getattr(batch.sparkSession, "_sc", None)
    if context is None:
        return None
    found = context.getLocalProperty(_QUERY)
    return None if found is None else str(found)


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
