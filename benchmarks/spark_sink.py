"""How fast Spark writes jobs, and in how much memory: beside code written by hand, and beside the server's limit.

Spark runs in a process of its own and is warmed; all rates of a row come from one session, taken in turns.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import redis

from benchmarks.harness import Row, compare, server
from chasqui.embedded import EmbeddedServer
from chasqui.protocol.codec import Envelope, encode_envelope

JOBS, QUEUE = 400_000, "bench"
STREAM = f"{{chasqui:{QUEUE}}}:stream"


class Spark:
    """A Spark process that does what it is told, a line of JSON at a time."""

    def __init__(self, url: str) -> None:
        environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
        environment |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.spark_sink", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def rate(self, way: str) -> float:
        return JOBS / float(self.ask(way=way, rows=JOBS)["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def _spark() -> Iterator[tuple[Spark, EmbeddedServer]]:
    with server() as valkey:
        spark = Spark(valkey.url)
        try:
            for way in ("by_hand", "exactly_once", "at_least_once"):
                spark.rate(way)
            yield spark, valkey
        finally:
            spark.close()


def sink_exactly_once_vs_handwritten() -> Row:
    """400,000 rows of three columns, against foreachPartition with a redis-py pipeline, which is at-least-once."""
    with _spark() as (spark, _):
        return compare(
            "sink_exactly_once_vs_handwritten",
            lambda: spark.rate("exactly_once"),
            lambda: spark.rate("by_hand"),
            target=2.5,
            unit="rows/s",
            against="foreachPartition, redis-py pipeline of 1,000",
        )


def sink_vs_xadd_limit() -> Row:
    """The same rows, exactly once, against as many XADDs, encoded beforehand, through a bare socket."""
    with _spark() as (spark, valkey):
        return compare(
            "sink_vs_xadd_limit",
            lambda: spark.rate("exactly_once"),
            lambda: _bare_xadds(valkey),
            target=0.35,
            unit="rows/s",
            against="pre-encoded XADDs, bare socket",
        )


def sink_at_least_once_vs_exactly_once() -> Row:
    """delivery=atLeastOnce against exactlyOnce, the same rows."""
    with _spark() as (spark, _):
        return compare(
            "sink_at_least_once_vs_exactly_once",
            lambda: spark.rate("at_least_once"),
            lambda: spark.rate("exactly_once"),
            target=1.0,
            unit="rows/s",
            against="exactlyOnce",
        )


def sink_worker_memory() -> Row:
    """Peak memory of the Python worker that writes one partition of a million rows, against a hundred thousand."""
    with server() as valkey:

        def peak(rows: int) -> float:
            spark = Spark(valkey.url)
            try:
                return float(spark.ask(way="exactly_once", rows=rows, partitions=1, memory=True)["peak_kib"])
            finally:
                spark.close()

        return compare(
            "sink_worker_memory",
            lambda: peak(1_000_000),
            lambda: peak(100_000),
            target=1.1,
            unit="KiB at the peak",
            against="a tenth of the rows",
            at_most=True,
            repeats=1,
        )


def sink_server_memory() -> Row:
    """Peak memory that a batch takes on the server, while it is written, against the bytes of its jobs."""
    with server() as valkey:
        plain = redis.Redis.from_url(valkey.url)
        spark = Spark(valkey.url)
        try:
            spark.rate("exactly_once")
            plain.execute_command("FLUSHALL", "SYNC")  # else memory of the run before would be given back meanwhile
            before = int(plain.info("memory")["used_memory"])
            told = spark.ask(way="exactly_once", rows=JOBS, server_memory=True)
            size = sum(len(fields[b"d"]) for _, fields in plain.xrange(STREAM, count=1000)) * JOBS / 1000
        finally:
            spark.close()
        return compare(
            "sink_server_memory",
            lambda: float(told["server_peak"]) - before,
            lambda: size,
            target=2.2,
            unit="bytes at the peak",
            against="the jobs' own bytes",
            at_most=True,
            repeats=1,
        )


def _bare_xadds(valkey: EmbeddedServer) -> float:
    """The server's own limit for such jobs: encoded beforehand, sent in bulks of 1,000 on one connection."""
    redis.Redis.from_url(valkey.url).flushall()
    commands = b"".join(_xadd(i) for i in range(1000))
    assert valkey.port is not None
    with socket.create_connection(("127.0.0.1", valkey.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = time.perf_counter()
        for _ in range(JOBS // 1000):
            connection.sendall(commands)
            left = 1000 * 2
            while left > 0:
                left -= connection.recv(1 << 16).count(b"\n")
        return JOBS / (time.perf_counter() - start)


def _xadd(i: int) -> bytes:
    payload = msgpack.packb({"n": i, "email": f"user-{i}@example.org", "score": i * 0.5})
    envelope = encode_envelope(Envelope(f"{i:026d}", payload, 1_794_978_620_538, 0))
    args = [b"XADD", STREAM.encode(), b"*", b"d", envelope, b"n", b"welcome"]
    return b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)


# --- In the Spark process ------------------------------------------------------------------------------------------


def _serve(url: str) -> None:
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    plain = redis.Redis.from_url(url)
    frames: dict[tuple[int, int], Any] = {}
    for version, line in enumerate(sys.stdin):
        told = json.loads(line)
        shape = (int(told["rows"]), int(told.get("partitions", 2)))
        if shape not in frames:
            rows = spark.range(0, shape[0], 1, shape[1]).selectExpr(
                "id as n", "concat('user-', id, '@example.org') as email", "cast(id * 0.5D as double) as score"
            )
            frames[shape] = rows.cache()
            frames[shape].count()
        plain.delete(STREAM)
        watch = _Watch(plain, told)
        start = time.perf_counter()
        _WAYS[told["way"]](frames[shape], url, version)
        answer = {"seconds": time.perf_counter() - start, **watch.stop()}
        assert plain.xlen(STREAM) == shape[0]
        print(json.dumps(answer), flush=True)
    spark.stop()


def _by_hand(frame: Any, url: str, version: int) -> None:
    """What people write: an id, a pipeline of 1,000, one XADD a row; with Python's collector as Spark leaves it."""

    def partition(rows: Iterator[Any]) -> None:
        import gc
        import uuid

        gc.unfreeze()
        client = redis.Redis.from_url(url)
        pipe = client.pipeline(transaction=False)
        pending = 0
        for row in rows:
            payload = msgpack.packb(row.asDict())
            job = msgpack.packb([str(uuid.uuid4()), payload, int(time.time() * 1000), 0])
            pipe.xadd(STREAM, {"d": job, "n": "welcome"})
            pending += 1
            if pending == 1000:
                pipe.execute()
                pending = 0
        pipe.execute()
        gc.freeze()

    frame.foreachPartition(partition)


def _exactly_once(frame: Any, url: str, version: int) -> None:
    # A writer of this process: the versions of another one on the same server are not ours to repeat.
    _writer(frame, url).option("txnAppId", f"bench-{os.getpid()}").option("txnVersion", version).save()


def _at_least_once(frame: Any, url: str, version: int) -> None:
    _writer(frame, url).save()


def _writer(frame: Any, url: str) -> Any:
    writer = frame.write.format("chasqui").mode("append").option("url", url).option("queue", QUEUE)
    return writer.option("name", "welcome").option("maxStreamLen", 10_000_000)


_WAYS: dict[str, Callable[[Any, str, int], None]] = {
    "by_hand": _by_hand,
    "exactly_once": _exactly_once,
    "at_least_once": _at_least_once,
}


class _Watch:
    """Looks at memory while a write runs: the largest Python worker, or the server."""

    def __init__(self, plain: redis.Redis, told: dict[str, Any]) -> None:
        self._plain, self._told = plain, told
        self._worker = self._server = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._ended.set()
        self._thread.join()
        return {"peak_kib": self._worker, "server_peak": self._server}

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            if self._told.get("memory"):
                self._worker = max(self._worker, *_workers_rss(), 0)
            if self._told.get("server_memory"):
                self._server = max(self._server, int(self._plain.info("memory")["used_memory"]))


def _workers_rss() -> list[int]:
    """Resident memory of the Python processes below this one, in KiB."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, todo = [0], list(parents.get(os.getpid(), []))
    while todo:
        pid = todo.pop()
        todo += parents.get(pid, [])
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if "Name:\tpython" in status and "VmRSS:" in status:
            found.append(int(status.split("VmRSS:")[1].split()[0]))
    return found


ROWS: dict[str, Callable[[], Row]] = {
    "sink_exactly_once_vs_handwritten": sink_exactly_once_vs_handwritten,
    "sink_vs_xadd_limit": sink_vs_xadd_limit,
    "sink_at_least_once_vs_exactly_once": sink_at_least_once_vs_exactly_once,
    "sink_worker_memory": sink_worker_memory,
    "sink_server_memory": sink_server_memory,
}

if __name__ == "__main__":
    _serve(sys.argv[1])
