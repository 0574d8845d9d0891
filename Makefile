# Needs only python3 (>= 3.11, with venv) and make. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-aot lint check clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install moec with its developer tools (idempotent)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"moec needs Python >= 3.11, {sys.executable} is {sys.version.split()[0]}: run make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "moec needs Python's venv module (Debian: apt-get install python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing moec and its dependencies into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install $(PIP_FLAGS) --config-settings editable_mode=compat --editable '.[dev]'
	@touch $@

BIG := qwen3.5-397b-a17b --target tpu7x-8 --workload decode_512x9216
BIG_PROGRAM := generated/qwen3_5_397b_a17b/tpu7x_2x2x1/decode_512x9216
TINY := tiny/qwen3_5_moe --target cpu
TINY_WEIGHTS := tests/fixtures/oracles/qwen3_5_moe
PROMPT := 154,95,250,227,152,103,166,228,70

demo: $(STAMP) ## plan, emit and compile a 397B model for TPU, then run a tiny one on this CPU
	$(BIN)/moec plan $(BIG)
	$(BIN)/moec compile $(BIG)
	$(BIN)/moec verify $(BIG_PROGRAM) --aot --bucket decode
	$(BIN)/moec compile $(TINY)
	$(BIN)/moec run $(TINY) --weights $(TINY_WEIGHTS) --ids $(PROMPT) --max-tokens 24
	$(BIN)/moec verify $(TINY) --reference $(TINY_WEIGHTS)/ref.npz

test: $(STAMP) ## the tests (at most 10 minutes on 2 cores; no network, no torch)
	$(PYTEST) -m "not slow and not aot and not aot_all"

test-full: test ## `make test`, then all meshes and the TPU compilations (marks slow and aot)
	$(PYTEST) -m "slow or aot"

test-aot: $(STAMP) ## every shipped model's decode step and every kernel compiled for TPUs (marks aot and aot_all)
	$(BIN)/python -m pytest -m "aot or aot_all" tests/aot/test_specs.py tests/aot/test_kernels.py

lint: $(STAMP) ## style, types, import laws and drift of generated/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p moec
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/moec compile --check

check: lint test ## everything a change must pass: lint and test

clean: ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .moec_cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
