# Every target builds .venv by itself, from pyproject.toml alone, and only when that file changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
STAMP  := $(VENV)/.installed
# Test processes. Most tests wait for something most of the time, so more than there are cores.
WORKERS ?= 4

# Spark and every server stay on loopback; Spark's Python workers run on the venv's interpreter.
export SPARK_LOCAL_IP := 127.0.0.1
export PYSPARK_PYTHON := $(BIN)/python
export PYSPARK_DRIVER_PYTHON := $(BIN)/python
# A query starts several Python processes. They find bytecode, as they do where the package is installed.
unexport PYTHONDONTWRITEBYTECODE

# Tests that run in Spark, and the pages whose examples do: fewer processes, because each starts a Java machine.
SPARK_TESTS   := tests/spark tests/examples
SPARK_WORKERS ?= 2

.PHONY: help venv java check format test test-engine test-spark demo bench docs clean

help:
	@echo "make check   format check, lint, types, docs"
	@echo "make test    all tests, against every server found (TESTS=path, ARGS='-k name' to choose)"
	@echo "make demo    the whole product in a minute: private server, Spark, workers, a kill, a report"
	@echo "make bench   measured rates beside their floors (ROWS=a,b to choose)"
	@echo "make docs    write docs/options.md from the declarations"
	@echo "make format  rewrite the sources in house format"
	@echo "make clean   remove .venv and caches"

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is older, or not there. Set PYTHON=/path/to/python3.11."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get -qq update && apt-get -qq -y install python3-venv; \
	    else echo "Python's venv module is missing: install Debian's package python3-venv."; exit 1; fi; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

# Spark needs Java 17 or newer: that of JAVA_HOME, else the first in PATH.
JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)

java:
	@command -v $(JAVA) >/dev/null || \
	  { if [ -n "$(JAVA_HOME)" ]; then echo "JAVA_HOME is $(JAVA_HOME), and there is no bin/java in it: correct or unset it."; exit 1; \
	    elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	      echo "java is missing: installing openjdk-17-jre-headless"; \
	      apt-get -qq update && apt-get -qq -y install openjdk-17-jre-headless >/dev/null; \
	    else echo "Java 17 or newer is needed by Spark: install openjdk-17-jre-headless."; exit 1; fi; }
	@version=$$($(JAVA) -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p'); [ "$${version:-0}" -ge 17 ] || \
	  { echo "Java 17 or newer is needed by Spark; $(JAVA) is $${version:-of no known version}. Set JAVA_HOME to a newer one."; exit 1; }

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

ifdef TESTS
test: $(STAMP) java
	$(BIN)/python -m pytest -n $(SPARK_WORKERS) $(TESTS) $(ARGS)
else
test: test-engine test-spark
endif

# A choice by ARGS may leave nothing in one of the two: pytest says so with 5, which is not a failure here.
test-engine: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) $(addprefix --ignore=,$(SPARK_TESTS)) $(ARGS) || $(if $(ARGS),[ $$? = 5 ],false)

# Short-lived Java machines: compiling quickly and collecting on one thread leaves the cores to the tests, and
# tests/spark_home.py says what else makes them start soon.
QUICK_JAVA := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable
SPARK_MADE := $(VENV)/spark/.made

$(SPARK_MADE): $(STAMP) tests/spark_home.py | java
	JAVA_TOOL_OPTIONS='$(QUICK_JAVA)' $(BIN)/python -m tests.spark_home $(@D)
	@touch $@

test-spark: $(SPARK_MADE) java
	SPARK_HOME=$(CURDIR)/$(<D) JAVA_TOOL_OPTIONS='$(QUICK_JAVA) -XX:SharedArchiveFile=$(CURDIR)/$(<D)/classes.jsa' \
	  $(BIN)/python -m pytest -n $(SPARK_WORKERS) --dist worksteal $(SPARK_TESTS) $(ARGS) || $(if $(ARGS),[ $$? = 5 ],false)

demo: $(STAMP) java
	SPARK_CONF_DIR=$(CURDIR)/conf $(BIN)/python jobs/demo.py

bench: $(STAMP) java
	$(BIN)/python -m benchmarks $(if $(ROWS),--rows $(ROWS))

docs: $(STAMP)
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info
