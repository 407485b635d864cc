# Everything a checkout needs. Nothing here is needed to use an installed AENV.

.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TARGET := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/aenv/target
AS_ROOT := $(if $(filter 0,$(shell id -u)),,sudo --preserve-env)

# Outside the checkout, so that a fresh clone need not compile the dependencies again.
export CARGO_TARGET_DIR := $(TARGET)
export PATH := $(PATH):$(HOME)/.cargo/bin:/usr/local/sbin:/usr/sbin:/sbin

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

.PHONY: setup
setup: host-packages programs assets ## install what is missing, build everything; quick when there is nothing to do

.PHONY: demo
demo: setup ## the main job end to end, through the E2B SDK
	$(AS_ROOT) $(BIN)/python demo/main.py

.PHONY: test
test: setup cargo-test ## Rust and Python tests, but for those that take minutes
	$(AS_ROOT) $(BIN)/pytest -m "not slow"

.PHONY: test-full
test-full: setup cargo-test ## all tests
	$(AS_ROOT) $(BIN)/pytest

.PHONY: lint
lint: $(VENV)/installed ## formatting, types, import layers, clippy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	cargo fmt --check
	cargo clippy --locked --workspace --all-targets -- -D warnings

.PHONY: check
check: setup lint test ## lint and test: what CI runs

.PHONY: bench
bench: setup ## how long create, pause, resume, fork take here
	$(AS_ROOT) $(BIN)/aenv bench lifecycle

.PHONY: clean
clean: ## remove what was made in this checkout; what is shared stays in the cache
	rm -rf $(VENV) native/src/aenv_native/bin .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	@echo "Kept: $(TARGET) and the guest assets (aenv assets status)"

.PHONY: host-packages
host-packages:
	@scripts/host-packages

.PHONY: programs
programs: host-packages
	@scripts/build-programs

.PHONY: assets
assets: $(VENV)/installed programs
	@$(AS_ROOT) $(BIN)/python -m aenv.guest.assets

.PHONY: cargo-test
cargo-test:
	cargo test --locked --workspace

$(VENV)/installed: pyproject.toml native/pyproject.toml constraints.txt | host-packages
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check -e native -e '.[server,dev]'
	@touch $@
