# Two commands for a newcomer: `make demo` and `make test`. Both need Python 3.11 or newer and nothing else:
# they create .venv in this folder, install what they need into it, and run.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

JOBS ?= 2
# Processes that test kernels on one GPU at a time; most of their time compiles on a core.
GPU_JOBS ?= 8
# Pools of ranks that share one GPU at a time.
NCCL_JOBS ?= 3
# Faults of `make test-faults`, about eight seconds each.
FAULTS ?= 40
# Changed files of `make fuzz`, over all readers; its cases of layouts and moves, and its plans.
CASES ?= 60000
LAYOUTS ?= 600000
PLANS ?= 2000
# Steps, and batches that are planned twice, of `make soak`; PYTHON2 is the interpreter that plans them the second time.
STEPS ?= 5000
BATCHES ?= 1000000
PYTHON2 ?= $(BIN)/python
# Hosts whose plug-ins `make test-plugins` tests; none named: all.
HOSTS ?=
# `make fuzz`, `make test-faults` and `make soak` end after so many seconds each, and go on where they have ended.
LIMIT_S ?= 3600
# The first interpreter that runs and is new enough; override with `make PYTHON=/path/to/python demo`.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$python; break; fi; \
	done)

VENV := .venv
BIN := $(VENV)/bin
# Where counts of `make fuzz`, `make test-faults` and `make soak` go; benchmarks/results has those of large runs.
OUT ?= build/results
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_READY := $(VENV)/.ready-demo
DEV_READY := $(VENV)/.ready-dev
DOCS_READY := $(VENV)/.ready-docs
INPUTS := pyproject.toml constraints.txt
# Traces of a step: other work on the GPU or the cores would move its kernels.
ALONE := tests/gpu/test_host_gpu.py tests/nccl/test_overlap_nccl.py

.PHONY: help demo docs fuzz soak test test-browser test-faults test-full test-gpu test-cluster test-plugins lint format types layers bench wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(DEMO_READY)  ## plan a long-tailed batch on 64 GPUs, then check and race plans of a tiny model on this machine
	@$(BIN)/seqloom demo

test: lint layers types  ## style, layers, types, then every test that takes seconds
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-full: lint layers types  ## the longer set: slow tests, more examples; logged to build/test-full.log
	@mkdir -p build
	set -o pipefail; $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu and not nccl and not cluster and not plugins" \
		--hypothesis-profile=full --timeout=1800 --durations=20 2>&1 | tee build/test-full.log

test-gpu: $(DEV_READY)  ## kernels on a GPU, then 2, 4 and 8 ranks over NCCL that share it; without a GPU it says so
	$(BIN)/python -m pytest -m gpu -n $(GPU_JOBS) -p no:cacheprovider --timeout=600 tests/gpu tests/distributed/test_cuda.py $(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest -m nccl -n $(NCCL_JOBS) --dist load --maxschedchunk 1 -p no:cacheprovider --timeout=600 tests/nccl $(ALONE:%=--ignore=%)
	$(BIN)/python -m pytest -m "gpu or nccl" -n 0 -p no:cacheprovider --timeout=600 $(ALONE)

test-cluster: $(DEV_READY)  ## two nodes with four slow network cards each, on this machine; needs root and iproute2
	$(BIN)/python -B -m pytest -m cluster -n 0 -p no:cacheprovider --timeout=120 --session-timeout=240 tests/cluster

test-browser: $(DEV_READY)  ## reports in a headless Chromium, with screenshots in build/browser; without one it says so
	$(BIN)/python -m pytest -m browser -n 0 -p no:cacheprovider tests/browser

test-plugins: $(DEV_READY)  ## plug-ins with the real torchtitan, Megatron-Core, verl, SkyRL and Ray: make test-plugins HOSTS="verl ray"
	$(BIN)/python tests/plugins/run.py $(HOSTS)

fuzz: $(DEV_READY)  ## changed files for every reader, layouts and plans element by element: make fuzz CASES=1000000
	$(BIN)/python tests/fuzz/run.py --cases $(CASES) --jobs $(JOBS) --seconds $(LIMIT_S) --state build/fuzz.json --out $(OUT)/fuzz.json
	$(BIN)/python tests/fuzz/arithmetic.py --layouts $(LAYOUTS) --plans $(PLANS) --jobs $(JOBS) --seconds $(LIMIT_S) \
		--state build/fuzz-arithmetic.json --out $(OUT)/fuzz_arithmetic.json

test-faults: $(DEV_READY)  ## training runs that meet faults until they are complete: make test-faults FAULTS=300
	$(BIN)/python tests/faults/run.py --faults $(FAULTS) --seconds $(LIMIT_S) --state build/faults.json --out $(OUT)/faults.json

soak: $(DEV_READY)  ## thousands of steps with changing plans, then batches planned twice: nothing grows, every hash is equal
	$(BIN)/python benchmarks/long_run.py --ranks 2 --steps $(STEPS) --seconds $(LIMIT_S) --out $(OUT)/soak_steps.json
	$(BIN)/python tests/soak/run.py --batches $(BATCHES) --python $(PYTHON2) --seconds $(LIMIT_S) --out $(OUT)/soak_plans.json

lint: $(DEV_READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV_READY)  ## ruff: repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV_READY)  ## pyrefly
	$(BIN)/pyrefly check --output-format=min-text

layers: $(DEV_READY)  ## import-linter: the layers of the design
	$(BIN)/lint-imports --no-logo

bench: $(DEV_READY)  ## every benchmarks/bench_*.py in turn; logged to build/bench.log
	@mkdir -p build
	@set -e -o pipefail; for script in benchmarks/bench_*.py; do \
		echo "== $$script"; $(BIN)/python $$script; done 2>&1 | tee build/bench.log

docs: $(DOCS_READY)  ## the site of docs/, with the reference, in build/site; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "open build/site/index.html"

wheel: $(DEV_READY)  ## build the wheel into dist/
	$(PIP) wheel -q --no-deps -w dist .

clean:  ## remove the environment, caches and build products
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up. Two stamps in one environment: dev contains all that demo needs, so it sets both.
define need_python
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "Seqloom needs Python 3.11 or newer; found $(or $(PYTHON),none) ($$($(or $(PYTHON),python3) --version 2>&1 || true))." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; fi
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then "$(PYTHON)" -m venv $(VENV); fi
endef

$(DEMO_READY): $(INPUTS)
	$(need_python)
	$(PIP) install -q -c constraints.txt -e ".[exact,train]"
	@touch $@

$(DEV_READY): $(INPUTS)
	$(need_python)
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	@touch $(DEMO_READY) $@

$(DOCS_READY): $(INPUTS)
	$(need_python)
	$(PIP) install -q -c constraints.txt -e ".[dev,docs]"
	@touch $(DEMO_READY) $(DEV_READY) $@
