"""The format ``chasqui``: checks what the user wrote, then hands over. Nothing is decided here.

Spark makes this object in several short-lived processes, so making it has no side effect, and this module imports
nothing but PySpark until it is used: it is loaded for every query of every user who has it installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

FORMAT = "chasqui"


class ChasquiDataSource(DataSource):
    """``spark.read|readStream.format("chasqui")`` and ``df.write|writeStream.format("chasqui")``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        """Columns of the view. Called by ``load()``, so bad options and an unreachable server stop there."""
        from chasqui_spark.options import source_options
        from chasqui_spark.source import check_server
        from chasqui_spark.views import schema_of

        options = source_options(self.options)
        columns = schema_of(options)
        check_server(options)
        return columns

    def reader(self, schema: StructType) -> DataSourceReader:
        from chasqui_spark.batch_reader import batch_reader
        from chasqui_spark.options import source_options

        return batch_reader(source_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        from chasqui_spark.options import source_options

        options = source_options(self.options, streaming=True)
        if options.mode == "consume":
            from chasqui_spark.consume_reader import ConsumeReader

            return ConsumeReader(options, schema)
        from chasqui_spark.stream_reader import StreamReader

        return StreamReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from chasqui_spark.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's name)
        from chasqui_spark.writer import stream_writer

        return stream_writer(self.options, schema, overwrite)


def register(spark: SparkSession, url: str | None = None) -> None:
    """Make the format known to a session that was started before this package was installed, and listen to its queries.

    The listener settles jobs of ``mode=consume`` as soon as Spark has committed them, on the server at ``url``
    (``CHASQUI_URL`` where it is left out); without a listener the next batch does it.
    """
    from chasqui_spark.committed import settle_from
    from chasqui_spark.listener import attach
    from chasqui_spark.options import server_of

    source: Any = ChasquiDataSource
    spark.dataSource.register(source)
    settle_from(attach(spark), server_of(url))
