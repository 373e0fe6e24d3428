"""Spark looks for data sources in top-level modules named pyspark_*: this makes the format known to it."""

from chasqui_spark.datasource import ChasquiDataSource as DefaultSource

__all__ = ["DefaultSource"]
