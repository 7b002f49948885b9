# Two commands are all a newcomer needs: `make demo` and `make test`.
# Each target makes .venv when it is missing or pyproject.toml changed; a second call reuses it.

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v) 2>/dev/null)) python3)
BIN := .venv/bin
PIP = $(shell command -v uv >/dev/null 2>&1 && echo "uv pip" || echo "$(BIN)/uv pip")
INSTALLED := .venv/.installed

.PHONY: help demo test lint format bench hints clean

help:
	@echo "make demo    run real rollouts on this machine and look at them"
	@echo "make test    run the test suite"
	@echo "make lint    ruff and mypy"
	@echo "make bench   slots, loop and tools, each beside its control"
	@echo "make clean   remove .venv and everything built"

$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@command -v uv >/dev/null 2>&1 || test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(PIP) install --quiet --python $(BIN)/python --editable '.[dev]'
	@touch $@

hints:
	@command -v cc >/dev/null 2>&1 || echo "hint: no C compiler; slots are made from Python, slower (apt-get install gcc libc6-dev)"
	@test "$$(id -u)" = 0 || echo "hint: not root; slots are rootless namespaces, limits by rlimits (hermes-rl doctor tells more)"

demo: $(INSTALLED) hints
	$(BIN)/hermes-rl demo

test: $(INSTALLED) hints
	$(BIN)/pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) hints
	$(BIN)/hermes-rl pool bench
	$(BIN)/hermes-rl bench loop

clean:
	rm -rf .venv .tools build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
