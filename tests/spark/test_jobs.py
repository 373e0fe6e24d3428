"""The pipelines of jobs/, each run as its users run it: by spark-submit, against a real queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from chasqui import Consumer, Producer, UnrecoverableError
from tests.support import eventually

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def submit(job: str, *arguments: str, expect: int = 0, **environment: str) -> str:
    """Run a pipeline; what it printed."""
    settings = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    done = subprocess.run(
        [str(BIN / "spark-submit"), *conf, str(ROOT / "jobs" / job), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == expect, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def work_off(url: str, queue: str, jobs: int) -> None:
    """Run a worker until so many jobs have ended: those whose payload says so fail."""

    def handler(job: Any) -> None:
        if job.payload["to"].startswith(" "):
            raise UnrecoverableError("no address")

    consumer = Consumer(url, queue=queue, block_ms=50)
    thread = threading.Thread(target=consumer.run_sync, args=(handler,))
    thread.start()
    with Producer(url, queue=queue) as producer:
        eventually(lambda: (s := producer.stats()).waiting + s.pending + s.delayed == 0, within=30)
    consumer.stop()
    thread.join(30)


def payloads(url: str, queue: str) -> list[Any]:
    """What waits in the queue, taken out in order by a worker."""
    taken: list[Any] = []
    consumer = Consumer(url, queue=queue, block_ms=50)
    thread = threading.Thread(target=consumer.run_sync, args=(lambda job: taken.append((job.name, job.payload)),))
    thread.start()
    with Producer(url, queue=queue) as producer:
        eventually(lambda: (s := producer.stats()).waiting + s.pending == 0, within=30)
    consumer.stop()
    thread.join(30)
    return taken


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows))


@pytest.mark.timeout(300)
def test_files_are_enqueued_once_as_batch_and_as_stream(one_url: str, one_queue: str, tmp_path: Path) -> None:
    first = [{"to": f"user{n}", "kind": "welcome"} for n in range(50)]
    write_rows(tmp_path / "in" / "a.json", first)
    common = ("--input", str(tmp_path / "in"), "--format", "json", "--queue", one_queue)
    select = ("--select", "kind AS name, struct(to) AS payload")
    once = ("--txn-app-id", "files", "--txn-version", "1")

    submit("enqueue_files.py", *common, *select, *once, CHASQUI_URL=one_url)
    submit("enqueue_files.py", *common, *select, *once, CHASQUI_URL=one_url)

    assert sorted(payloads(one_url, one_queue), key=str) == sorted(
        [("welcome", {"to": row["to"]}) for row in first], key=str
    )

    stream = (*common, "--stream", "--checkpoint", str(tmp_path / "checkpoint"), "--name", "again")
    submit("enqueue_files.py", *stream, CHASQUI_URL=one_url)
    write_rows(tmp_path / "in" / "b.json", [{"to": "new", "kind": "k"}])
    told = submit("enqueue_files.py", *stream, CHASQUI_URL=one_url)

    assert "enqueued 1 new rows" in told
    assert len(payloads(one_url, one_queue)) == 51


@pytest.mark.timeout(300)
def test_events_are_archived_by_day_without_doubles_and_judged(one_url: str, one_queue: str, tmp_path: Path) -> None:
    with Producer(one_url, queue=one_queue) as producer:
        producer.add_bulk([{"to": "ana"}] * 18 + [{"to": " "}] * 2, name="mail")
    work_off(one_url, one_queue, 20)
    where = ("--path", str(tmp_path / "history"), "--checkpoint", str(tmp_path / "checkpoint"))

    first = submit("archive_events.py", "--queue", one_queue, *where, CHASQUI_URL=one_url)
    again = submit("archive_events.py", "--queue", one_queue, *where, CHASQUI_URL=one_url)

    assert "archived 0 events" in again
    archived = int(first.split("archived ")[1].split(" ")[0])
    assert archived >= 42  # 20 started, 18 completed, 2 failed, 2 given up; and perhaps drained
    assert list((tmp_path / "history" / f"queue={one_queue}").glob("day=*/*.parquet"))

    objectives = ("--max-p99-ms", "60000", "--max-failures")
    kept = submit("queue_slo.py", "--queue", one_queue, *objectives, "0.5", CHASQUI_URL=one_url)
    assert "0 of 1 windows missed" in kept or "0 of 2 windows missed" in kept
    submit("queue_slo.py", "--queue", one_queue, *objectives, "0.01", CHASQUI_URL=one_url, expect=1)


@pytest.mark.timeout(300)
def test_dead_letters_are_reported_repaired_and_replayed(one_url: str, one_queue: str) -> None:
    with Producer(one_url, queue=one_queue) as producer:
        producer.add_bulk([{"to": " ana", "n": 1}, {"to": " ben", "n": 2}, {"to": "cleo", "n": 3}], name="mail")
        work_off(one_url, one_queue, 3)
        common = ("--queue", one_queue, "--payload-schema", "to STRING, n INT")

        told = submit("dlq_triage.py", *common, CHASQUI_URL=one_url)
        assert "unrecoverable" in told
        assert "no address" in told
        assert producer.stats().dlq == 2

        repair = ("--repair", "named_struct('to', trim(payload.to), 'n', payload.n)")
        told = submit("dlq_triage.py", *common, "--where", "payload.n = 1", *repair, "--replay", CHASQUI_URL=one_url)

        assert "0 such letters are left" in told
        assert producer.stats().dlq == 1
    assert payloads(one_url, one_queue) == [("mail", {"to": "ana", "n": 1})]


HANDLERS = """
from chasqui import UnrecoverableError

def check(job):
    if job.payload["to"].startswith(" "):
        raise UnrecoverableError("no address")
    return len(job.payload["to"])
"""


@pytest.mark.timeout(300)
def test_a_queue_is_drained_and_dead_letters_make_it_fail(one_url: str, one_queue: str, tmp_path: Path) -> None:
    (tmp_path / "check_addresses.py").write_text(HANDLERS)
    run = ("--queue", one_queue, "--handler", "check_addresses:check", "--store-results", "--min-partitions", "2")
    paths = {"CHASQUI_URL": one_url, "PYTHONPATH": str(tmp_path)}
    with Producer(one_url, queue=one_queue) as producer:
        ids = producer.add_bulk([{"to": "x" * n} for n in range(1, 41)])

        told = submit("drain_queue.py", *run, **paths)

        assert "worked on 40 jobs" in told
        assert producer.get_result_bulk(ids) == list(range(1, 41))
        producer.add({"to": " "})
        assert "1 new dead letters" in submit("drain_queue.py", *run, **paths, expect=1)
        stats = producer.stats()
    assert (stats.waiting, stats.pending, stats.dlq) == (0, 0, 1)


@pytest.mark.timeout(300)
def test_the_demo_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.html"

    told = submit("demo.py", "--orders", "2000", "--seconds", "4", "--report", str(report))

    figures = {
        row[0].strip(): row[1].strip() for line in told.splitlines() if len(row := line.split("\u2502")[1:3]) == 2
    }
    assert figures["orders enqueued by Spark"] == "2,000"
    assert int(figures["completed"].replace(",", "")) + int(figures["dead letters"]) == 2000
    assert (figures["lost"], figures["doubled"]) == ("0", "0")
    assert int(figures["retried"]) > 0
    page = report.read_text()
    assert page.count("<svg") == 3
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    told = submit("archive_events.py", "--queues", "a", "--queue", "b", "--path", "p", "--checkpoint", "c", expect=2)

    assert "error: [CMQ-004] exactly one of queue, queues and queuePattern is expected, got queue and queues" in told
    assert "Traceback" not in told
