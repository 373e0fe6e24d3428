"""conf/spark-defaults.conf and conf/log4j2.properties, read by a real spark-submit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pyspark
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
log = spark._jvm.org.apache.logging.log4j.LogManager
log.getLogger("org.example.Quiet").info("not to be seen")
log.getLogger("org.example.Loud").warn("to be seen")
print("SETTINGS", json.dumps(dict(spark.sparkContext.getConf().getAll())))
spark.range(3).write.format("noop").mode("overwrite").save()
spark.stop()
"""


def declared() -> dict[str, str]:
    lines = (ROOT / "conf" / "spark-defaults.conf").read_text().splitlines()
    return dict(line.split(None, 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    script = tmp_path_factory.mktemp("submit") / "program.py"
    script.write_text(PROGRAM)
    env = {
        **os.environ,
        "SPARK_CONF_DIR": str(ROOT / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    command = [str(submit), "--master", "local[1]", "--conf", "spark.ui.enabled=false", "--driver-memory", "1g"]
    return subprocess.run([*command, str(script)], env=env, capture_output=True, text=True, timeout=110)


def test_spark_takes_every_setting(submitted: subprocess.CompletedProcess[str]) -> None:
    assert submitted.returncode == 0, submitted.stderr[-3000:]

    [line] = [line for line in submitted.stdout.splitlines() if line.startswith("SETTINGS ")]
    found = json.loads(line.removeprefix("SETTINGS "))
    assert len(declared()) >= 5
    assert {name: found.get(name) for name in declared()} == declared()


def test_every_setting_is_one_that_spark_knows() -> None:
    """A misspelled name would be taken without a word. Spark's own names stand in the classes of its jars."""
    jars = sorted((Path(pyspark.__file__).parent / "jars").glob("spark-*.jar"))
    wanted = {name.encode() for name in declared()}
    for jar in jars:
        with zipfile.ZipFile(jar) as held:
            for entry in held.namelist():
                if "config/package$" in entry or "SQLConf" in entry or "internal/config" in entry:
                    text = held.read(entry)
                    wanted = {name for name in wanted if name not in text}
    assert wanted == set()


def test_every_logger_is_a_class_that_spark_brings() -> None:
    text = (ROOT / "conf" / "log4j2.properties").read_text()
    names = re.findall(r"^logger\.\w+\.name = (.+)$", text, re.MULTILINE)
    wanted = {f"{name.replace('.', '/')}.class" for name in names}
    for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar"):
        if jar.name.startswith(("spark-sql_", "hadoop-client")):
            with zipfile.ZipFile(jar) as held:
                wanted -= set(held.namelist())

    assert names
    assert wanted == set()


def test_logs_are_short_and_warnings_are_seen(submitted: subprocess.CompletedProcess[str]) -> None:
    assert "WARN  Loud: to be seen" in submitted.stderr
    assert "not to be seen" not in submitted.stderr
    assert " INFO " not in submitted.stderr
