# Two commands are all a newcomer needs: `make demo` and `make test`.
# Each target makes .venv when it is missing or pyproject.toml changed; a second call reuses it.

PYTHON ?= $(firstword $(foreach v,3.11 3.12 3.13,$(shell command -v python$(v) 2>/dev/null)) python3)
BIN := .venv/bin
PIP = $(shell command -v uv >/dev/null 2>&1 && echo "uv pip" || echo "$(BIN)/uv pip")
INSTALLED := .venv/.installed
# Twice the cores, because tests wait half of their time: for timeouts, for processes to end, for a dead server.
WORKERS ?= $(shell n=$$((2 * $$(nproc))); echo $$((n < 8 ? n : 8)))
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
QUICK := -m "not slow and not ci"
# Containers often forbid bytecode. Then each of the thousand programs that the tests start compiles what it imports (2 s).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-ci test-random test-user test-pythons test-slow chaos soak mutants fuzz learn-check lint format bench helpers nomad vllm readers hints clean

help:
	@echo "make demo    run real rollouts on this machine and look at them"
	@echo "make test    run the test suite (TESTS=tests/attacks for a part, here and below)"
	@echo "make test-ci   what CI runs besides: real engines (docker, ssh, Slurm, ...), the wheel, the commands of every page"
	@echo "make test-random   the same in random order; repeat one with SEED=its number"
	@echo "make test-user   as root: what differs for an ordinary user, run as one"
	@echo "make test-pythons   as root: the suite on Python 3.11, 3.12 and 3.13, as root and as a user, random order, busy cores"
	@echo "make test-slow   the same promises at full size: 1,000 rollouts, all of HumanEval, ..."
	@echo "make chaos   everything fails, nothing is lost: CHAOS_SECONDS (600) of faults, repeat one with SEED=its number"
	@echo "make soak    SOAK_LEASES (50,000) and SOAK_ROLLOUTS (5,000): memory, descriptors, disk and latency stay flat"
	@echo "make mutants   change lines of the pool, the journal, tokens and packing one by one: do tests notice? (an hour)"
	@echo "make learn-check   a real model learns: the rise over 20 minutes, asserted"
	@echo "make lint    ruff and mypy"
	@echo "make bench   slots, loop, tools and serving, each beside its control"
	@echo "make fuzz    the C helper's readers on hostile bytes, FUZZ_SECONDS long (needs clang)"
	@echo "make helpers build the slot helper for x86_64 and aarch64 (a 100 MB cross compiler from PyPI)"
	@echo "make nomad   build the Nomad that the live tests start, where there is none (needs go 1.24.7)"
	@echo "make vllm    prepare a real vLLM for its live tests (6 GB)"
	@echo "make readers prepare Harbor, Inspect, OpenEnv and pyarrow, which the exports are checked with (500 MB)"
	@echo "make clean   remove .venv and everything built"

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "hermes-rl needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@command -v uv >/dev/null 2>&1 || test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	@$(PIP) install --quiet --python $(BIN)/python --editable '.[dev,learn]' && $(BIN)/hermes-rl model get >/dev/null || \
		{ echo "hint: the CPU model cannot be had here; the demo goes on with scripted policies"; \
		  $(PIP) install --quiet --python $(BIN)/python --editable '.[dev]'; }
	@touch $@

hints:
	@command -v cc >/dev/null 2>&1 || $(BIN)/python -c 'import ziglang' 2>/dev/null || \
		echo "hint: slots need a C compiler: apt-get install gcc libc6-dev, or make helpers"
	@test "$$(id -u)" = 0 || echo "hint: not root; slots are rootless namespaces, limits by rlimits (hermes-rl doctor tells more)"

demo: $(INSTALLED) hints
	$(BIN)/hermes-rl demo

test: $(INSTALLED) hints
	$(BIN)/pytest $(PARALLEL) $(QUICK) $(TESTS)

test-ci: $(INSTALLED) hints
	$(BIN)/pytest $(PARALLEL) -m 'ci and not slow' $(TESTS)

test-random: $(INSTALLED) hints
	$(BIN)/pytest $(PARALLEL) $(QUICK) -p randomly $(if $(SEED),--randomly-seed=$(SEED)) $(TESTS)

test-user:
	bash tests/support/as_ordinary_user.sh $(TESTS)

test-pythons:
	bash tests/support/on_three_pythons.sh $(TESTS)

test-slow: $(INSTALLED) hints
	$(BIN)/pytest -m slow --timeout 1800

# SECONDS is a variable of the shell itself, so the target has its own name for it.
chaos: $(INSTALLED) hints
	$(BIN)/python tests/chaos --seconds $(or $(CHAOS_SECONDS),600) $(if $(SEED),--seed $(SEED))

soak: $(INSTALLED) hints
	$(BIN)/python tests/soak --leases $(or $(SOAK_LEASES),50000) --rollouts $(or $(SOAK_ROLLOUTS),5000)

# In a copy of the tree, because mutmut writes beside the sources; `mutmut show NAME` there prints a mutant.
mutants: $(INSTALLED)
	$(PIP) install --quiet --python $(BIN)/python mutmut==3.8.1
	rm -rf build/mutants && git checkout-index --all --prefix=build/mutants/
	cd build/mutants && $(CURDIR)/$(BIN)/mutmut run $(MUTANTS)
	$(BIN)/python tests/support/mutants_left.py build/mutants

fuzz:
	bash tests/fuzz/fuzz.sh $(or $(FUZZ_SECONDS),60)

learn-check: $(INSTALLED) hints
	$(BIN)/pytest -m slow -s tests/environments/apps/learn/test_learn_check.py

# Pinned by tests/live/nomad/go.mod. Only tests use it; users install Nomad the way its makers say (BUSL-licensed).
nomad:
	@if command -v nomad >/dev/null 2>&1; then echo "nomad is on PATH"; else $(MAKE) --no-print-directory .tools/nomad; fi

.tools/nomad: tests/live/nomad/go.mod tests/live/nomad/go.sum
	@command -v go >/dev/null 2>&1 || { echo "building nomad needs go 1.24.7 or later"; exit 1; }
	@mkdir -p .tools
	cd tests/live/nomad && GOTOOLCHAIN=local CGO_ENABLED=1 go build -mod=mod -trimpath -tags hashicorpmetrics \
		-ldflags "-s -w" -o ../../../.tools/nomad github.com/hashicorp/nomad

# For slots on hosts of another kind than this machine, and for tests of the wheel; the wheel carries both.
helpers: $(INSTALLED)
	$(PIP) install --quiet --python $(BIN)/python --editable '.[helpers]'
	$(BIN)/python -m sandbox_pool.server.build.helper_build

vllm: $(INSTALLED)
	bash tests/live/vllm/prepare.sh
	@echo "ready: $(BIN)/pytest -m slow tests/live/vllm"

readers: $(INSTALLED)
	bash tests/live/exports/prepare.sh
	@echo "ready: $(BIN)/pytest -m slow tests/live/exports"

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
	$(BIN)/hermes-rl bench tools
	$(BIN)/hermes-rl bench serve

clean:
	rm -rf .venv .tools build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
