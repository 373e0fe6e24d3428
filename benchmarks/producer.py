"""How fast jobs are added, and in how much memory."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import redis

from benchmarks.harness import Row, compare, native_python, redis8, server, skipped
from chasqui import Producer
from chasqui.protocol.codec import Envelope, encode_envelope

JOBS, BULK = 200_000, 1_000
# A turn takes half a second. On a machine with neighbours three turns are too few for a median to mean something.
REPEATS = 7
NAMED = [("welcome", {"to": "ana", "n": i}) for i in range(BULK)]


def add_bulk_vs_socket() -> Row:
    """add_bulk_named of 1,000 against the same jobs, encoded beforehand, through a bare socket."""
    with server() as valkey:
        plain = redis.Redis.from_url(valkey.url)

        def ours() -> float:
            plain.flushall()
            with Producer(valkey.url, queue="bench", max_stream_len=10 * JOBS) as producer:
                producer.add_bulk_named(NAMED)
                return _rate(lambda: producer.add_bulk_named(NAMED))

        def bare() -> float:
            plain.flushall()
            commands = b"".join(_xadd(name, i) for i, (name, _) in enumerate(NAMED))
            assert valkey.port is not None
            with socket.create_connection(("127.0.0.1", valkey.port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _push(connection, commands)
                return _rate(lambda: _push(connection, commands))

        return compare(
            "add_bulk_vs_socket",
            ours,
            bare,
            target=0.7,
            unit="jobs/s",
            against="pre-encoded XADDs, bare socket",
            repeats=REPEATS,
        )


def add_bulk_vs_native() -> Row:
    """add_bulk_named of 1,000 against the original's, both on Redis 8.10."""
    name, target, unit, against = "add_bulk_vs_native", 3.0, "jobs/s", "chasquimq add_bulk_named"
    binary, python = redis8(), native_python()
    if not binary or not python:
        return skipped(name, "needs Redis 8.10 and the wheel chasquimq", target=target, unit=unit, against=against)
    with server(binary) as redis8_server:
        plain = redis.Redis.from_url(redis8_server.url)

        def ours() -> float:
            plain.flushall()
            with Producer(redis8_server.url, queue="bench", max_stream_len=10 * JOBS) as producer:
                producer.add_bulk_named(NAMED)
                return _rate(lambda: producer.add_bulk_named(NAMED))

        def native() -> float:
            plain.flushall()
            script = Path(__file__).with_name("native_producer.py")
            done = subprocess.run(
                [python, str(script), redis8_server.url, str(JOBS), str(BULK)],
                capture_output=True,
                text=True,
                check=True,
            )
            return float(json.loads(done.stdout.splitlines()[-1])["rate"])

        return compare(name, ours, native, target=target, unit=unit, against=against, repeats=REPEATS)


def add_million_memory() -> Row:
    """Peak memory of a process that adds a million jobs in bulks, against one that adds a hundred thousand."""
    with server() as valkey:
        plain = redis.Redis.from_url(valkey.url)

        def peak(jobs: int) -> float:
            plain.flushall()
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.producer", valkey.url, str(jobs)],
                capture_output=True,
                text=True,
                check=True,
            )
            return float(done.stdout)

        return compare(
            "add_million_memory",
            lambda: peak(1_000_000),
            lambda: peak(100_000),
            target=1.05,
            unit="KiB at the peak",
            against="a tenth of the jobs",
            at_most=True,
            repeats=1,
        )


def _rate(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(JOBS // BULK):
        call()
    return JOBS / (time.perf_counter() - start)


def _xadd(name: str, i: int) -> bytes:
    import msgpack

    envelope = encode_envelope(Envelope(f"{i:026d}", msgpack.packb({"to": "ana", "n": i}), 1_794_978_620_538, 0))
    args = [b"XADD", b"{chasqui:bench}:stream", b"*", b"d", envelope, b"n", name.encode()]
    return b"*%d\r\n" % len(args) + b"".join(b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args)


def _push(connection: socket.socket, commands: bytes) -> None:
    connection.sendall(commands)
    lines = 0
    while lines < 2 * BULK:
        lines += connection.recv(1 << 20).count(b"\r\n")


ROWS: dict[str, Callable[[], Row]] = {
    "add_bulk_vs_socket": add_bulk_vs_socket,
    "add_bulk_vs_native": add_bulk_vs_native,
    "add_million_memory": add_million_memory,
}


def _add_many(url: str, jobs: int) -> None:
    with Producer(url, queue="memory", max_stream_len=2_000_000) as producer:
        for _ in range(jobs // BULK):
            producer.add_bulk_named(NAMED)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    _add_many(sys.argv[1], int(sys.argv[2]))
