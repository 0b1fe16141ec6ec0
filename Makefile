# Three commands for people: `make quickstart`, `make test`, `make env`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed-runtime
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: env quickstart test test-faults check clean

env: $(STAMP)

# The stamps are the environment's: made anew only when what it was made from changes.
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"vit_ray needs Python 3.11 or 3.12, this is {v[0]}.{v[1]}; set PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=24"
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(STAMP): $(RUNTIME)
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

quickstart: $(RUNTIME)
	@$(BIN)/python jobs/quickstart.py jobs/recipes/digits.yaml

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site
	$(BIN)/deptry vit_ray jobs --optional-dependencies-dev-groups dev
	$(BIN)/deptry vit_ray jobs tests benchmarks

test: check
	$(BIN)/python -m pytest

test-faults: env
	$(BIN)/python -m pytest -o addopts=-q tests/faults

clean:
	rm -rf quickstart runs
