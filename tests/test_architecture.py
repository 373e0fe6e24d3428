"""The shape of the package: who imports whom, what is public, what scripts say about themselves."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chasqui
from chasqui import AsyncProducer, Producer, bridge, errors
from chasqui.protocol import scripts

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "engine" / "chasqui"
MODULES = sorted(PACKAGE.rglob("*.py"))
PURE = sorted((PACKAGE / "protocol").rglob("*.py"))
EVERYWHERE = sorted(
    path
    for path in ROOT.rglob("*.py")
    if not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(ROOT).parts)
)
CONNECTOR = sorted((ROOT / "chasqui_spark").rglob("*.py"))
PIPELINES = sorted((ROOT / "jobs").rglob("*.py"))
NOT_PURE = {"redis", "asyncio", "threading", "time", "random", "logging", "socket"}


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module named in an import of that file, wherever it stands, with all that lead to it: a.b gives a, a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {".".join(name.split(".")[: i + 1]) for name in found for i in range(name.count(".") + 1)}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- Imports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PURE, ids=shown)
def test_protocol_imports_no_io_clock_randomness_or_logging(path: Path) -> None:
    assert imports(path) & NOT_PURE == set()


@pytest.mark.parametrize("path", PURE, ids=shown)
def test_protocol_imports_nothing_that_does_io(path: Path) -> None:
    doing = {"chasqui.redis_io", "chasqui.producer", "chasqui.embedded", "chasqui.address", "chasqui.options"}

    assert imports(path) & doing == set()


def test_only_the_modules_that_talk_import_redis() -> None:
    importers = {path.stem for path in MODULES if "redis" in imports(path)}

    assert "redis_io" in importers
    assert importers <= {"redis_io", "connections", "redis_errors", "embedded"}


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_engine_does_not_import_spark(path: Path) -> None:
    assert imports(path) & {"pyspark", "pyarrow", "chasqui_spark"} == set()


def test_importing_chasqui_loads_neither_spark_nor_arrow() -> None:
    code = "import chasqui, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    # Isolated but for the path of the package: no .pth file or plug-in of the environment decides the outcome.
    start = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {code}"

    loaded = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True).stdout.split()

    assert "chasqui" in loaded
    assert {"pyspark", "pyarrow", "pandas", "numpy", "chasqui_spark", "rich"}.isdisjoint(loaded)


def test_only_the_command_line_imports_rich_and_only_when_it_draws() -> None:
    importers = {path for path in MODULES if "rich" in imports(path)}

    assert importers
    assert {path.parent for path in importers} == {PACKAGE / "cli"}
    for path in importers:
        top = ast.parse(path.read_text(encoding="utf-8")).body
        named = [ast.unparse(node) for node in top if isinstance(node, ast.Import | ast.ImportFrom)]
        assert [line for line in named if line.startswith(("import rich", "from rich"))] == []


def test_the_command_line_is_not_loaded_by_the_rest() -> None:
    importers = {path for path in MODULES if "chasqui.cli" in imports(path)}

    assert {shown(path) for path in importers if path.parent != PACKAGE / "cli"} == {"engine/chasqui/__main__.py"}


def test_errors_import_nothing_of_the_package() -> None:
    assert "chasqui" not in imports(PACKAGE / "errors.py")


@pytest.mark.parametrize("path", EVERYWHERE, ids=shown)
def test_nobody_imports_through_engine(path: Path) -> None:
    """Through ``engine`` every module would be loaded twice, with two sets of error classes."""
    assert "engine" not in imports(path)


@pytest.mark.parametrize("path", [*CONNECTOR, *PIPELINES], ids=shown)
def test_what_stands_on_the_engine_imports_only_its_public_names(path: Path) -> None:
    public = {"chasqui", "chasqui.bridge"} | {f"chasqui.{name}" for name in chasqui.__all__}
    public |= {f"chasqui.bridge.{name}" for name in bridge.__all__}

    used = {name for name in imports(path) if name.split(".")[0] == "chasqui"}
    assert used - public == set()


@pytest.mark.parametrize("path", CONNECTOR, ids=shown)
def test_connector_works_over_spark_connect(path: Path) -> None:
    """Through Connect there is no JVM and no SparkContext to reach for."""
    reached = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"sparkContext", "_jvm", "_jsparkSession", "_sc"}
    }

    assert reached == set()


def test_spark_finds_the_format_without_loading_the_engine() -> None:
    """Spark imports pyspark_chasqui in every planning process, also for queries that never use the format."""
    code = (
        "import sys, pyspark.sql.datasource; before = set(sys.modules); import pyspark_chasqui; "
        "print(pyspark_chasqui.DefaultSource.name(), *sorted(set(sys.modules) - before))"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    name, *loaded = found.stdout.split()
    assert name == "chasqui"
    assert {n.partition(".")[0] for n in loaded} <= {"pyspark_chasqui", "chasqui_spark", "pyspark", "importlib"}


# --- Public names --------------------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_named_once() -> None:
    assert list(chasqui.__all__) == sorted(set(chasqui.__all__))


@pytest.mark.parametrize("name", chasqui.__all__)
def test_public_name_exists(name: str) -> None:
    assert hasattr(chasqui, name)


def test_names_for_connectors_are_named_once_and_there() -> None:
    assert len(bridge.__all__) == len(set(bridge.__all__))
    assert [name for name in bridge.__all__ if not hasattr(bridge, name)] == []


def public(cls: type) -> dict[str, object]:
    return {name: member for name, member in inspect.getmembers(cls) if not name.startswith("_")}


def test_both_producers_have_the_same_public_names() -> None:
    assert set(public(Producer)) == set(public(AsyncProducer))


@pytest.mark.parametrize("name", ["__init__", *(n for n, m in public(Producer).items() if callable(m))])
def test_both_producers_take_the_same_arguments(name: str) -> None:
    assert inspect.signature(getattr(Producer, name)) == inspect.signature(getattr(AsyncProducer, name))


@pytest.mark.parametrize("name", [n for n, m in public(Producer).items() if callable(m)])
def test_method_is_awaited_in_one_producer_and_not_in_the_other(name: str) -> None:
    assert inspect.iscoroutinefunction(getattr(AsyncProducer, name))
    assert not inspect.iscoroutinefunction(getattr(Producer, name))


@pytest.mark.parametrize("name", [n for n, m in public(Producer).items() if callable(m)])
def test_both_producers_describe_a_method_alike(name: str) -> None:
    assert getattr(Producer, name).__doc__
    assert getattr(Producer, name).__doc__ == getattr(AsyncProducer, name).__doc__


def error_classes(root: type[errors.ChasquiError] = errors.ChasquiError) -> list[type[errors.ChasquiError]]:
    return [root, *(c for sub in root.__subclasses__() for c in error_classes(sub))]


def drawn_errors() -> dict[str, tuple[int, str]]:
    """The tree in the docstring of errors: name, depth and code of each line."""
    line = re.compile(r"^    (?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: \(also \w+\))?(?: +(?P<code>CMQ-\d{3})|$)", re.M)
    return {m["name"]: (len(m["branch"]) // 4, m["code"] or "") for m in line.finditer(str(errors.__doc__))}


def test_docstring_of_errors_draws_every_class_at_its_place_with_its_code() -> None:
    declared = {
        cls.__name__: (cls.__mro__.index(errors.ChasquiError), cls.code)
        for cls in error_classes()
        if cls.__module__ == errors.__name__
    }
    declared["ChasquiError"] = (0, "")  # the root stands without its code, which nobody sees

    assert drawn_errors() == declared


# --- Lua -----------------------------------------------------------------------------------------------------------

each_script = pytest.mark.parametrize("name", scripts.names())


def header_and_code(name: str) -> tuple[list[str], str]:
    lines = scripts.script(name).source.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("--"))
    return [line.removeprefix("--").strip() for line in lines[:end]], "\n".join(lines[end:])


def documented(header: list[str], array: str) -> tuple[list[int], int | None]:
    """The single places of KEYS or ARGV that the header names, and where the open-ended rest begins, if it does."""
    places = [m for line in header if (m := re.match(rf"{array}\[(\d+)(\.\.\.)?\] \w+", line))]
    singles = [int(m[1]) for m in places if not m[2]]
    rest = [int(m[1]) for m in places if m[2]]
    assert len(rest) <= 1
    return singles, rest[0] if rest else None


@each_script
def test_script_starts_with_purpose_keys_arguments_and_returns(name: str) -> None:
    header, code = header_and_code(name)
    parts = ["".join(re.match(r"KEYS|ARGV|returns|", line)[0]) or "purpose" for line in header]  # type: ignore[index]

    expected = ["purpose", "KEYS", *(["ARGV"] if "ARGV" in code else []), "returns"]
    assert list(dict.fromkeys(parts)) == expected
    assert parts == sorted(parts, key=expected.index)


@each_script
@pytest.mark.parametrize("array", ["KEYS", "ARGV"])
def test_header_names_the_places_that_the_code_uses(name: str, array: str) -> None:
    header, code = header_and_code(name)
    singles, rest = documented(header, array)

    used = [int(place) for place in re.findall(rf"{array}\[(\d+)\]", code)]
    computed = re.search(rf"{array}\[(?!\d+\])|unpack\({array},", code) is not None
    assert singles == list(range(1, max(used, default=0) + 1))
    assert rest == (len(singles) + 1 if computed else None)


@each_script
def test_script_is_used(name: str) -> None:
    assert any(f'script("{name}")' in path.read_text(encoding="utf-8") for path in MODULES)


def test_every_script_that_is_called_exists() -> None:
    called = {n for path in MODULES for n in re.findall(r'\bscript\("(\w+)"\)', path.read_text(encoding="utf-8"))}

    assert called <= set(scripts.names())
