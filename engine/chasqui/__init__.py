"""A job queue on Redis Streams, byte for byte compatible with ChasquiMQ, on Redis 6.2+ and Valkey."""

from __future__ import annotations

import logging

from chasqui import embedded
from chasqui.consumer import Consumer
from chasqui.errors import (
    AuthFailed,
    BulkInterrupted,
    ChasquiError,
    CheckpointInUse,
    ConfigError,
    ConnectionLost,
    CronError,
    DataLoss,
    DecodeError,
    EmbeddedServerError,
    HandlerError,
    LedgerAhead,
    LedgerBroken,
    NoFutureFire,
    OptionError,
    OutOfMemory,
    PayloadError,
    QueueFull,
    ReadOnlyServer,
    RedisError,
    ResultTimeout,
    RetryLater,
    ServerError,
    StageExpired,
    UnrecoverableError,
    WrongKeyType,
)
from chasqui.handlers import Router, batch
from chasqui.job import Backoff, DelayedJob, DlqEntry, Job, NewJob, Overview, RetryOverride, Stats, WorkerSeen
from chasqui.metrics import DlqRouted, JobOutcome, LockOutcome, PromoterTick, ReaderBatch, RetryScheduled
from chasqui.options import ConsumerOptions, ProducerOptions, PromoterOptions, SchedulerOptions
from chasqui.producer import AsyncProducer, Producer
from chasqui.promoter import Promoter
from chasqui.protocol.events import Event
from chasqui.queue_events import QueueEvents
from chasqui.repeat import MissedFires, RepeatableMeta, RepeatableSpec, RepeatPattern
from chasqui.scheduler import Scheduler
from chasqui.sinks import InMemorySink, MetricsSink, NoopSink, PrometheusSink
from chasqui.version import __version__

__all__ = [
    "AsyncProducer",
    "AuthFailed",
    "Backoff",
    "BulkInterrupted",
    "ChasquiError",
    "CheckpointInUse",
    "ConfigError",
    "ConnectionLost",
    "Consumer",
    "ConsumerOptions",
    "CronError",
    "DataLoss",
    "DecodeError",
    "DelayedJob",
    "DlqEntry",
    "DlqRouted",
    "EmbeddedServerError",
    "Event",
    "HandlerError",
    "InMemorySink",
    "Job",
    "JobOutcome",
    "LedgerAhead",
    "LedgerBroken",
    "LockOutcome",
    "MetricsSink",
    "MissedFires",
    "NewJob",
    "NoFutureFire",
    "NoopSink",
    "OptionError",
    "OutOfMemory",
    "Overview",
    "PayloadError",
    "Producer",
    "ProducerOptions",
    "PrometheusSink",
    "Promoter",
    "PromoterOptions",
    "PromoterTick",
    "QueueEvents",
    "QueueFull",
    "ReadOnlyServer",
    "ReaderBatch",
    "RedisError",
    "RepeatPattern",
    "RepeatableMeta",
    "RepeatableSpec",
    "ResultTimeout",
    "RetryLater",
    "RetryOverride",
    "RetryScheduled",
    "Router",
    "Scheduler",
    "SchedulerOptions",
    "ServerError",
    "StageExpired",
    "Stats",
    "UnrecoverableError",
    "WorkerSeen",
    "WrongKeyType",
    "__version__",
    "batch",
    "embedded",
]

logging.getLogger("chasqui").addHandler(logging.NullHandler())
