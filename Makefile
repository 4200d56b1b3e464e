# Everything runs in a virtual environment of its own. A machine needs python3 (>= 3.11) and make, nothing else.
#   make demo     what fxmem does, on a real model
#   make test     lint, types, all tests          (make quick: without the slow ones)
# Another interpreter:  make test PYTHON=python3.12        Another environment:  make test VENV=/tmp/venv
# More pytest options:  make test PYTEST_ARGS="-k dropout"

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed

# Models are built from configurations: nothing is ever downloaded. Plots need no screen.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export MPLBACKEND := Agg

.PHONY: help install demo test quick lint types format fuzz bench plots clean distclean
.DEFAULT_GOAL := help

help:
	@sed -n '2,5s/^# //p' Makefile
	@echo "Targets: install demo test quick lint types format fuzz bench plots clean distclean"

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
	@$(PY) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*p["dependencies"], *sum(p["optional-dependencies"].values(), []), sep="\n")' > $(VENV)/requirements.txt
	@$(PIP_INSTALL) -r $(VENV)/requirements.txt
	@$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	$(PY) -m benchmarks.demo

test: lint types
	$(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

quick: lint types
	$(PY) -m pytest -n 2 --dist worksteal -m "not slow" $(PYTEST_ARGS)

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

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
