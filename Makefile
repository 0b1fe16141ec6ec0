# Three commands for people: `make quickstart`, `make test`, `make env`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: env quickstart test test-faults check clean

env: $(STAMP)

# The stamp is the environment's: it is made anew only when what it was made from changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"vit_ray needs Python 3.11 or 3.12, this is {v[0]}.{v[1]}; set PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

quickstart: env
	@$(BIN)/python jobs/quickstart.py jobs/recipes/digits.yaml

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/deptry vit_ray jobs --optional-dependencies-dev-groups dev
	$(BIN)/deptry vit_ray jobs tests benchmarks

test: check
	$(BIN)/python -m pytest

test-faults: env
	$(BIN)/python -m pytest -o addopts=-q tests/faults

clean:
	rm -rf quickstart runs
