# Everything runs in a virtual environment of its own. A machine needs python3 (>= 3.11) and make, nothing else.
#   make demo     what fxmem does, on a real model
#   make quick    lint, types and the quick tests: two minutes on 2 cores
#   make test     the same with the slow ones, what CI runs: 10 to 20 minutes on 2 cores
# Another interpreter:  make test PYTHON=python3.12        Another environment:  make test VENV=/tmp/venv
# More pytest options:  make test PYTEST_ARGS="-k dropout"

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
# Bytecode is compiled of what is imported, not of all files, which takes a minute longer.
PIP_INSTALL := $(PY) -m pip install -qq --no-compile --no-input --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed
REQUIREMENTS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *sum(p["optional-dependencies"].values(), []), sep="\n")

# Models are built from configurations: nothing is ever downloaded. Plots need no screen.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export MPLBACKEND := Agg

.PHONY: help install demo test quick test-all run-test run-quick run-test-all test-torch test-cuda-stub coverage lint types format fuzz bench plots docs clean distclean
.DEFAULT_GOAL := help

help:
	@sed -n '2,6s/^# //p' Makefile
	@echo "Tests: quick, test, test-all (whole sweeps and all notebooks), coverage (of lines and branches, by make test),"
	@echo "  test-torch TORCH=2.11.0 (the quick ones on another torch, in its own environment), fuzz (10,000 random models),"
	@echo "  test-cuda-stub (the CUDA tests on a device that computes nothing, in the environment of torch 2.14.1)"
	@echo "Others: install lint types format bench plots docs (the site, in build/docs) clean distclean"

install: $(STAMP)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fxmem needs Python 3.11 or newer, PYTHON=$(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

# torch first and by itself, then torchvision without its dependencies, so that no later line can exchange torch for
# another build of it; then what pyproject.toml names, at the versions of constraints.txt; then this checkout.
$(STAMP): constraints.txt pyproject.toml | $(PY)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) --no-deps torchvision
	@$(PY) -c '$(REQUIREMENTS)' > $(VENV)/requirements.txt
	@$(PIP_INSTALL) -r $(VENV)/requirements.txt
	@$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	$(PY) -m benchmarks.demo

# Three tiers, marked in the tests (tests/tiers.py): quick < test < test-all.
PYTEST := $(PY) -m pytest -n 2 --dist worksteal
QUICK := -m "not slow and not exhaustive"

# Types are checked beside the tests: mypy has one thread, and takes as long as a tenth of them.
WITH_TYPES = +@$(MAKE) --no-print-directory -j 2 types

test: lint
	$(WITH_TYPES) run-test

quick: lint
	$(WITH_TYPES) run-quick

test-all: lint
	$(WITH_TYPES) run-test-all

run-test: $(STAMP)
	$(PYTEST) -m "not exhaustive" $(PYTEST_ARGS)

run-quick: $(STAMP)
	$(PYTEST) $(QUICK) $(PYTEST_ARGS)

run-test-all: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

# Which lines and branches of fxmem `make test` runs. Not part of it: it takes half as long again.
coverage: $(STAMP)
	$(PYTEST) -m "not exhaustive" --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

# The quick tests on another torch, in an environment of its own (a CUDA build has several GB; it runs on the CPU too):
#   make test-torch TORCH=2.11.0        A cap on torch from outside the project:  PIP_CONFIG_FILE=/dev/null make ...
# torchvision comes along because each release of it takes one release of torch only: pip finds the pair. A torch may
# also want another setuptools than that of constraints.txt.
TORCH ?=
TORCH_VENV = .venv-torch-$(TORCH)
TORCH_PIP = $(TORCH_VENV)/bin/python -m pip install -q --no-input --disable-pip-version-check

test-torch:
	@test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.11.0"; exit 2; }
	@$(MAKE) --no-print-directory $(TORCH_VENV)/.installed TORCH=$(TORCH)
	$(TORCH_VENV)/bin/python -m pytest -n 2 --dist worksteal $(QUICK) $(PYTEST_ARGS)

.venv-torch-%/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-torch-$*
	@echo "installing torch $* into .venv-torch-$* (many minutes the first time)"
	@$(TORCH_PIP) torch==$* torchvision
	@grep -vE '^(torch|torchvision|setuptools)==' constraints.txt > .venv-torch-$*/constraints.txt
	@.venv-torch-$*/bin/python -m pip freeze | grep -E '^torch(vision)?==' >> .venv-torch-$*/constraints.txt
	@$(PYTHON) -c '$(REQUIREMENTS)' > .venv-torch-$*/requirements.txt
	@$(TORCH_PIP) -c .venv-torch-$*/constraints.txt -r .venv-torch-$*/requirements.txt
	@$(TORCH_PIP) --no-deps --no-build-isolation -e .
	@touch $@

# The CUDA tests on a device that computes nothing (tests/cuda_stub/README.md), with a CUDA build of torch in an
# environment of its own.   make test-cuda-stub DEVICE=a100-80gb
CUDA_TORCH ?= 2.14.1
DEVICE ?= h100-80gb
CUDA_VENV = .venv-torch-$(CUDA_TORCH)

test-cuda-stub: $(STAMP)
	@$(MAKE) --no-print-directory $(CUDA_VENV)/.installed TORCH=$(CUDA_TORCH)
	$(PY) -m tests.cuda_stub.build build/cuda_stub $(CUDA_VENV)/bin/python
	FXMEM_CUDA_VENV=$(CUDA_VENV) $(PY) -m tests.cuda_stub.launch $(DEVICE) -m tests.cuda_stub.probe_ops build/cuda_stub/$(DEVICE).json
	@sed -n '/^It cannot show/,/^$$/p' tests/cuda_stub/README.md
	FXMEM_CUDA_VENV=$(CUDA_VENV) $(PY) -m tests.cuda_stub.launch $(DEVICE) -m pytest -p no:xdist -q -m cuda tests/test_cuda.py $(PYTEST_ARGS)
	FXMEM_STUB_CUDNN_WORKSPACE=20000000 FXMEM_CUDA_VENV=$(CUDA_VENV) $(PY) -m tests.cuda_stub.launch $(DEVICE) -m pytest -p no:xdist -q -m cuda tests/test_cuda.py -k convolutions

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache --no-logo

types: $(STAMP)
	$(PY) -m mypy --strict fxmem

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# 10,000 random models under random planners and budgets on all cores, new ones each time; then the other tests with
# "fuzz" in their name, with many more random examples.   make fuzz FUZZ_ARGS="--cases 500 --seed 7"
FUZZ_ARGS ?=
fuzz: $(STAMP)
	FXMEM_CACHE=0 OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(FUZZ_ARGS)
	HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest -k "fuzz and not train_to_the_same_bits" $(PYTEST_ARGS)

bench: $(STAMP)
	$(PY) -m benchmarks

# The pictures of docs/images, from the committed results.
plots: $(STAMP)
	$(PY) -m benchmarks.plots

# The site: docs/ and the API reference from the docstrings. It loads nothing from the network, so it reads from files.
docs: $(STAMP)
	$(PY) -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './.venv-torch-*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) .venv-torch-*
