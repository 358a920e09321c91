# `make test` and `make demo` need only Python 3.11 to 3.13, and a package index for pip.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: test demo bench docs release-check matrix clean

test: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

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
