# make demo   the patent example on a real model          make test   the tests
# Needs Python 3.10+, a C++ compiler and make; everything else comes from the package index.

PYTHON ?= python3
VENV   ?= .venv
TEST   ?= tests
ARGS   ?=
# Tests run side by side, one worker a core, of up to 8: each may have a model in memory.
JOBS   ?= $(CORES)

CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check --no-input
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --maxprocesses 8 --dist worksteal $(TEST)
MYPY  := $(BIN)/mypy -p langchain_swarmkv -p examples.patent_analysis -p benchmarks.fanout

# Without ninja, CMake falls back to make, which compiles one file at a time unless told.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(CORES)

.PHONY: help demo install test test-long test-all test-unit format lint type bench bench-floor
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo
	@echo "  PYTHON=python3.12   the Python to make $(VENV) with (3.10 or newer)"
	@echo "  TEST=tests/x.py     what the test targets run"
	@echo "  JOBS=4              how many tests side by side (0: in this process, for a debugger)"
	@echo "  ARGS='--json o.json'  more options for make demo and make bench"

demo: $(VENV)/.installed-demo  ## Run the patent example on SmolLM2
	@$(BIN)/swarmkv demo $(ARGS)

install: $(VENV)/.installed-dev  ## Install the package with all that tests and linters need

test: $(VENV)/.installed-dev  ## Run the tests (TEST=path for some)
	$(PYTEST)

test-long: $(VENV)/.installed-dev  ## Run in full what make test cuts short
	TEST_LENGTH=full $(PYTEST) -m long

test-all: $(VENV)/.installed-dev  ## Run all tests, each in full (TEST=path for some)
	TEST_LENGTH=full $(PYTEST)

test-unit: TEST = tests/unit_tests
test-unit: $(VENV)/.installed-dev  ## Run the unit tests, on generated models (TEST=path for some)
	$(PYTEST)

format: $(VENV)/.installed-dev  ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.installed-dev  ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MYPY)
	$(BIN)/lint-imports

type: $(VENV)/.installed-dev  ## Check types (mypy strict)
	$(MYPY)

bench: $(VENV)/.installed-dev  ## Fan-out against its peers (ARGS='--workload W2 --plot out'; alone on the machine)
	$(BIN)/swarmkv bench fanout $(ARGS)

bench-floor: $(VENV)/.installed-dev  ## Engine against a bare llama_decode loop (run it alone on the machine)
	$(BIN)/python benchmarks/floor.py

$(VENV)/.installed-demo: EXTRAS = demo
$(VENV)/.installed-dev: EXTRAS = demo,test,lint,bench

# The stamps say that pyproject.toml, as it now is, has been installed.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/.created
	@echo "==> Installing langchain-swarmkv[$(EXTRAS)] into $(VENV)"
	@echo "==> llama-cpp-python is compiled here, unless pip has it: about 8 minutes on 2 cores, once"
	@echo "    (pip prints 'Building wheel for llama-cpp-python' meanwhile, and keeps what it built)"
	@$(PIP) install --progress-bar off --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null \
	  || { echo "error: no $(PYTHON) found; install Python 3.10 or newer, or name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.10 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "error: $(PYTHON) cannot make virtual environments (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@compilers="$${CXX:-c++ g++ clang++}"; for compiler in $$compilers; do \
	    command -v "$$compiler" >/dev/null && exit 0; done; \
	  echo "error: no C++ compiler found ($$compilers); llama.cpp is compiled here (on Debian: apt-get install g++)" >&2; exit 1
	@echo "==> Making $(VENV) with $$($(PYTHON) -V 2>&1)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@
