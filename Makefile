# `make test` and `make demo` need only Python 3.11 to 3.13, and a package index for pip.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Rooms of the tests that `make check` leaves out whole, so that they are not even collected.
SLOW_ROOMS = docs durability examples faults multiprocess

.PHONY: check lint test demo bench docs release-check matrix clean

# What tells most, in a minute and a half: no processes, no power cuts, no whole train loops.
check: lint
	$(BIN)/python -m pytest -n 2 -q --dist worksteal -m "not slow" $(addprefix --ignore=tests/,$(SLOW_ROOMS))

test: lint
	$(BIN)/python -m pytest -n 3 --dist worksteal

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(VENV)/ready
	$(BIN)/python examples/demo.py

docs: $(VENV)/ready
	$(BIN)/mkdocs build --strict

# The half hour of a new user: builds, installs in an empty environment, runs the quick start and the
# tutorial there.
release-check: $(VENV)/ready
	$(BIN)/python -m tests.test_release

# Every Python of 3.11 to 3.13 that is installed, with the lowest and the newest dependencies.
matrix: $(VENV)/ready
	$(BIN)/pip install --quiet uv
	UV=$(BIN)/uv .ci/matrix

bench: $(VENV)/ready
	$(BIN)/pip install --quiet --editable '.[bench]'
	$(BIN)/python -m benchmarks

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable '.[clu,docs,test]'
	touch $@

clean:
	rm -rf $(VENV) demo-run site dist
