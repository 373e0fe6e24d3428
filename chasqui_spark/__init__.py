"""The Spark connector: queues as DataFrames, DataFrames as jobs. The source comes next."""
