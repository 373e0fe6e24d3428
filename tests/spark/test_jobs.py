"""The pipelines of jobs/ against a real queue: each by spark-submit, as users run it, its other ways in our session."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from pyspark.sql import SparkSession

import chasqui_spark
from chasqui import Consumer, Producer, UnrecoverableError, embedded
from chasqui_spark.pipeline import MISTAKE, verdict
from tests.support import eventually

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def load_job(name: str) -> ModuleType:
    """A pipeline as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "jobs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(job: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Run a pipeline by spark-submit, in a process group of its own."""
    settings = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    return subprocess.Popen(
        [str(BIN / "spark-submit"), *conf, str(ROOT / "jobs" / job), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def submit(job: str, *arguments: str, expect: int = 0, **environment: str) -> str:
    """Run a pipeline to its end; what it printed."""
    with start(job, *arguments, **environment) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == expect, out[-3000:] + err[-5000:]
    return out + err


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


def committed(path: Path) -> list[Path]:
    """What Spark has committed to a folder of files, batch by batch."""
    return list((path / "_spark_metadata").glob("[0-9]*"))


@pytest.fixture
def job(
    spark: SparkSession, one_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs a pipeline in the session of the tests; what it printed."""
    monkeypatch.setenv("CHASQUI_URL", one_url)

    def call(name: str, *arguments: str, expect: int = 0) -> str:
        capsys.readouterr()
        assert load_job(name).main(list(arguments)) == expect
        return capsys.readouterr().out

    return call


@pytest.mark.timeout(300)
def test_files_are_enqueued_once_as_batch_and_as_stream(
    job: Callable[..., str], one_url: str, one_queue: str, tmp_path: Path
) -> None:
    csv, config = tmp_path / "leads.csv", tmp_path / "chasqui.toml"
    csv.write_text("to,kind\n" + "".join(f"user{n},welcome\n" for n in range(50)))
    config.write_text(f'[sink]\nqueue = "{one_queue}"\ntxn_app_id = "files"\ntxn_version = 1\n')
    batch = ("--input", str(csv), "--format", "csv", "--config", str(config))
    select = ("--select", "kind AS name, struct(to) AS payload")

    assert "enqueued 50 rows of" in submit("enqueue_files.py", *batch, *select, CHASQUI_URL=one_url)
    assert "skipped 50 rows, because files has version 1 already, of" in job("enqueue_files", *batch, *select)

    assert payloads(one_url, one_queue) == [("welcome", {"to": f"user{n}"}) for n in range(50)]

    parquet = tmp_path / "in"
    parquet.mkdir()
    pq.write_table(pa.table({"to": ["a", "b"], "n": [1, 2]}), parquet / "a.parquet")
    stream = ("--input", str(parquet), "--queue", one_queue, "--name", "again")
    stream = (*stream, "--stream", "--checkpoint", str(tmp_path / "checkpoint"))
    assert "enqueued 2 new rows of" in job("enqueue_files", *stream)
    pq.write_table(pa.table({"to": ["c"], "n": [3]}), parquet / "b.parquet")
    assert "enqueued 1 new rows of" in job("enqueue_files", *stream)

    assert sorted(payloads(one_url, one_queue), key=str) == [
        ("again", {"to": to, "n": n}) for to, n in (("a", 1), ("b", 2), ("c", 3))
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "queue"),
        (["--queue", "q", "--max-payload-bytes", "5"], "maxPayloadBytes (5)"),
        (["--queue", "q", "--select", "nosuch"], "nosuch"),
        (["--queue", "q", "--input", "/nowhere"], "/nowhere"),
        (["--queue", "q", "--select", "1 AS id, to"], "column id"),
    ],
)
def test_what_only_spark_finds_is_a_mistake_told_in_a_line(
    job: Callable[..., str], tmp_path: Path, more: list[str], words: str
) -> None:
    (tmp_path / "leads.csv").write_text("to,kind\nana,welcome\n")

    with pytest.raises(Exception) as raised:
        job("enqueue_files", "--input", str(tmp_path / "leads.csv"), "--format", "csv", *more)

    code, line = verdict(raised.value) or (0, "")
    assert code == MISTAKE, raised.value
    assert words in line
    assert "\n" not in line


@pytest.mark.timeout(300)
def test_events_are_archived_by_day_without_doubles_and_judged(
    job: Callable[..., str], spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, tmp_path: Path
) -> None:
    with Producer(one_url, queue=one_queue) as producer:
        producer.add_bulk([{"to": "ana"}] * 18 + [{"to": " "}] * 2, name="mail")
    work_off(one_url, one_queue, 20)
    history = tmp_path / "history"
    where = ("--queue", one_queue, "--path", str(history), "--checkpoint", str(tmp_path / "checkpoint"))
    events = f"{{chasqui:{one_queue}}}:events"

    first = job("archive_events", *where)
    archived = int(first.split("archived ")[1].split(" ")[0])
    assert archived == one_client.xlen(events) >= 42  # 20 started, 18 completed, 2 failed, 2 given up

    # The same checkpoint again, by spark-submit, until Ctrl-C.
    batches = len(committed(history))
    process = start("archive_events.py", *where, "--follow", "1s", CHASQUI_URL=one_url)
    one_client.xadd(events, {"e": "active", "id": "late", "ts": "1794978715267"})
    eventually(lambda: len(committed(history)) > batches, within=90)
    os.killpg(process.pid, signal.SIGINT)
    told = "".join(process.communicate(timeout=60))
    assert process.returncode == 130
    assert "Traceback" not in told
    assert (history / f"queue={one_queue}" / "day=2026-11-18").exists()
    assert spark.read.parquet(str(history)).count() == archived + 1

    objectives = (
        "--queue",
        one_queue,
        "--max-p99-ms",
        "60000",
        "--window",
        "1h",
        "--starting-timestamp",
        "1794979000000",
    )
    assert " windows missed" in submit("queue_slo.py", *objectives, "--max-failures", "0.5", CHASQUI_URL=one_url)
    assert "1 of " in job("queue_slo", *objectives, "--max-failures", "0.01", expect=1)


@pytest.mark.timeout(300)
def test_windows_are_written_as_they_close(
    job: Callable[..., str], spark: SparkSession, one_url: str, one_queue: str, one_client: redis.Redis, tmp_path: Path
) -> None:
    for second in (0, 1, 30):
        fields = {"e": "completed", "id": "i", "n": "mail", "duration_us": "1500", "attempt": "1"}
        at = 1_794_978_715_000 + second * 1000
        one_client.xadd(f"{{chasqui:{one_queue}}}:events", {**fields, "ts": str(at)}, id=f"{at}-0")
    where = ("--path", str(tmp_path / "slo"), "--checkpoint", str(tmp_path / "checkpoint"))

    def stop_when_written() -> None:
        eventually(lambda: len(committed(tmp_path / "slo")) > 1, within=90)
        [query.stop() for query in spark.streams.active]

    stopper = threading.Thread(target=stop_when_written)
    stopper.start()
    job("queue_slo", "--queue", one_queue, *where, "--window", "10s", "--lateness", "5s", "--follow", "200ms")
    stopper.join()

    [row] = spark.read.parquet(str(tmp_path / "slo")).collect()
    assert (row["name"], row["runs"], row["failure_rate"], row["p50_ms"]) == ("mail", 2, 0.0, 1.5)


@pytest.mark.timeout(300)
def test_dead_letters_are_reported_repaired_and_replayed(job: Callable[..., str], one_url: str, one_queue: str) -> None:
    with Producer(one_url, queue=one_queue) as producer:
        producer.add_bulk([{"to": " ana", "n": 1}, {"to": " ben", "n": 2}, {"to": "cleo", "n": 3}], name="mail")
        work_off(one_url, one_queue, 3)
        common = ("--queue", one_queue, "--payload-schema", "to STRING, n INT")

        told = submit("dlq_triage.py", *common, CHASQUI_URL=one_url)
        assert "unrecoverable" in told
        assert "no address" in told
        assert producer.stats().dlq == 2

        repair = ("--repair", "named_struct('to', trim(payload.to), 'n', payload.n)")
        told = job("dlq_triage", *common, "--where", "payload.n = 1", *repair, "--replay")

        assert "replayed 1 of 1 dead letters; 0 such letters are left" in told
        assert producer.stats().dlq == 1
        assert "replayed 0 of 0 dead letters" in job("dlq_triage", *common, "--where", "payload.n = 1", "--replay")
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
        producer.add({"to": " "})

        told = submit("drain_queue.py", *run, **paths, expect=1)

        assert "worked on 41 jobs" in told
        assert "1 new dead letters, 0 delayed, 0 waiting" in told
        assert producer.get_result_bulk(ids) == list(range(1, 41))
        stats = producer.stats()
    assert (stats.waiting, stats.pending, stats.dlq) == (0, 0, 1)


def refuse_one(job: Any) -> int:
    if job.payload["n"] == 1:
        raise UnrecoverableError("never")
    return int(job.payload["n"])


@pytest.mark.timeout(300)
def test_the_users_of_the_shipped_file_may_do_what_spark_does(
    job: Callable[..., str], spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acl = tmp_path / "users.acl"
    text = (ROOT / "conf" / "users.acl").read_text()
    acl.write_text(text.replace("user default off", "user default on nopass ~* &* +@all", 1))
    (tmp_path / "leads.csv").write_text("n\n1\n2\n3\n")
    with embedded.start(config={"aclfile": str(acl)}) as server:

        def url_of(role: str) -> str:
            return server.url.replace("redis://", f"redis://chasqui-{role}:CHANGE-{role}@")

        url = url_of("spark")
        monkeypatch.setenv("CHASQUI_URL", url)
        files = ("--input", str(tmp_path / "leads.csv"), "--format", "csv", "--txn-app-id", "a", "--txn-version", "1")
        assert "enqueued 3 rows" in job("enqueue_files", *files, "--queue", "q")
        place = {"queue": "q", "url": url, "checkpoint": tmp_path / "checkpoint"}
        query = chasqui_spark.worker(
            spark, handler=refuse_one, trigger={"availableNow": True}, store_results=True, **place
        )
        query.awaitTermination(90)
        assert "replayed 1 of 1 dead letters" in job("dlq_triage", "--queue", "q", "--replay", "--max-per-second", "9")
        reader = spark.read.format("chasqui").options(queuePattern="*", url=url)
        views = {
            view: reader.option("view", view).load().count() for view in ("jobs", "results", "repeatable", "stats")
        }
        assert views == {"jobs": 1, "results": 2, "repeatable": 0, "stats": 1}

        monkeypatch.setenv("CHASQUI_URL", url_of("observer"))
        job("queue_slo", "--queue", "q")
        with redis.Redis.from_url(server.url) as client:
            assert [entry for entry in client.acl_log() if entry["username"] != "default"] == []


@pytest.mark.timeout(300)
def test_the_demo_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.html"

    told = submit("demo.py", "--orders", "2007", "--seconds", "4", "--report", str(report))

    figures = {
        row[0].strip(): row[1].strip() for line in told.splitlines() if len(row := line.split("\u2502")[1:3]) == 2
    }
    assert figures["orders enqueued by Spark"] == "2,007"
    assert int(figures["completed"].replace(",", "")) + int(figures["dead letters"]) == 2007
    assert (figures["lost"], figures["doubled"]) == ("0", "0")
    assert int(figures["retried"]) > 0
    assert int(figures["run again because their worker was killed"]) > 0
    page = report.read_text()
    assert page.count("<svg") == 3
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
