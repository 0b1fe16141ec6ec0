# Three commands for people: `make quickstart`, `make test`, `make env`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed-runtime
STAMP := $(VENV)/.installed
# uv where it is present: the same versions, in a tenth of the time.
UV := $(shell command -v uv)
ifdef UV
MAKE_VENV := $(UV) venv --quiet --seed --allow-existing --python $(PYTHON) $(VENV)
PIP := $(UV) pip install --quiet --python $(BIN)/python
else
MAKE_VENV := $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

# Tests of figures that no processor may change, and those of them that were kept or published.
NUMERIC := tests/models tests/evaluation tests/worker/test_evaluation.py \
  $(addprefix tests/data/test_, crops.py jpeg.py order.py parts.py randaugment.py) \
  $(addprefix tests/training/test_, engine.py collectives.py objective.py optim.py)
PUBLISHED := tests/models/weights tests/data/test_crops.py
# The same libraries without the newer instructions of x86; elsewhere this changes nothing.
GENERIC := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OPENCV_CPU_DISABLE=AVX2,AVX512-SKX
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OPENCV_CPU_DISABLE=AVX512-SKX
# Two processes: one has the tests that need Ray, which wait half of their time.
BOTH := --numprocesses=2 --dist=loadgroup
# Without it a machine is generic itself, and cannot run what is compiled for AVX2.
HAS_AVX2 := $(shell grep -qsw avx2 /proc/cpuinfo && echo yes)

.PHONY: env quickstart test test-slow test-all test-generic test-gpu test-faults soak test-processors check check-docs test-browser team-mlflow newcomer screenshots clean

env: $(STAMP)

# Stamps of the environment: it is rebuilt only when its inputs change.
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else f"vit_ray needs Python 3.11 or 3.12, this is {v[0]}.{v[1]}; set PYTHON=python3.12")'
	$(MAKE_VENV)
	$(PIP) --constraint constraints.txt --editable .
	@touch $@

$(STAMP): $(RUNTIME)
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $@

quickstart: $(RUNTIME)
	@$(BIN)/vit-ray quickstart digits

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The pages build, and what is imported is declared, and the reverse.
check-docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site
	$(BIN)/deptry vit_ray jobs --optional-dependencies-dev-groups dev
	$(BIN)/deptry vit_ray jobs tests benchmarks docs

# Every behaviour once. The matrices and the long jobs are in `test-slow`.
test: check
	$(BIN)/python -m pytest $(BOTH) --durations=10

test-slow: env
	$(BIN)/python -m pytest $(BOTH) --slow=only --durations=10

test-all: test check-docs test-generic test-browser test-slow

# As the processor that differs most from this one.
test-generic: env
ifdef HAS_AVX2
	$(GENERIC) $(BIN)/python -m pytest $(PUBLISHED) --slow=also
endif

test-processors: env
	$(BIN)/python -m pytest --slow=also $(NUMERIC)
	$(GENERIC) $(BIN)/python -m pytest --slow=also $(NUMERIC)
ifdef HAS_AVX2
	$(AVX2) $(BIN)/python -m pytest --slow=also $(NUMERIC)
endif

# What only a GPU can show, on a machine that has one; two minutes.
test-gpu: env
	DS_ACCELERATOR=cuda $(BIN)/python -m pytest -o addopts=-q tests/gpu

test-faults: env
	$(BIN)/python -m pytest --slow=also -o addopts=-q tests/faults

# Hours; the same command continues it. SOAK_FAULTS=10 takes about an hour.
SOAK_FAULTS ?= 200
soak: env
	$(BIN)/python -m tests.faults.soak build/soak-$(SOAK_FAULTS) --faults $(SOAK_FAULTS)

# MLflow's pages and ours in Chromium (apt-get install chromium chromium-driver npm), and pictures for docs/mlflow.md.
STORE ?= sqlite:///quickstart/mlflow.db
test-browser: env build/axe.min.js
	$(BIN)/python -m pytest --slow=also -o addopts=-q tests/browser

# Finds what people cannot read or reach (MPL-2.0; only tests use it).
build/axe.min.js:
	mkdir -p build && cd build && npm pack --silent axe-core@4.14.1
	tar -xzf build/axe-core-4.14.1.tgz -C build --strip-components=1 package/axe.min.js
	rm build/axe-core-4.14.1.tgz

# A team's MLflow as cluster/mlflow.yaml has it, on PostgreSQL and S3 (apt-get install postgresql).
team-mlflow: env
	$(BIN)/python -m pytest --slow=also -o addopts=-q tests/tracking/test_team_server.py

# README, tutorial and how-to pages in a fresh clone with an environment of its own: an hour.
newcomer:
	$(PYTHON) -m tests.newcomer.follow

screenshots: env
	$(BIN)/python docs/screenshots.py $(STORE)

clean:
	rm -rf quickstart runs
