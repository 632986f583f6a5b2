# Each target does all of its set-up in a fresh clone. PYTHON picks the interpreter (3.11 to 3.13).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install --no-compile -c constraints.txt
STUDY ?= first

# Some environments ask Python to write no bytecode. Then every process compiles all that it imports
# of torch, which makes the start of each two to three times as long.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-dev study test test-slow test-all lint site clean

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "zpp_lab needs Python 3.11 to 3.13; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# pip would compile 16,000 files (--no-compile); the imports leave bytecode of those that runs need.
$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch==2.13.0
	$(PIP) -e '.[report]'
	$(BIN)/python -c 'import zpp_lab.train.trainer, zpp_lab.engines.fsdp.engine, zpp_lab.study.report.report'
	touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(VENV)/.ready
	DS_BUILD_OPS=0 $(PIP) -e '.[dev]'
	touch $@

# The convergence study: trains every arm of conf/study/$(STUDY).yaml and writes runs/$(STUDY)/report.html
study: setup
	$(BIN)/zpp-lab study $(STUDY)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

# What `make test` leaves out: a process for each file, two at a time, and a summary
test-slow: setup-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.slow

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The pages and the Python API as a site in build/site; a warning is an error
site: setup
	$(PIP) -e '.[site]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
