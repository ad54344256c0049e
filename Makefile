# `make train` and `make test` do everything a fresh machine needs: a virtual environment, torch, the package.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that run the tests, with one thread each: a file's tests stay together, so that what it sets up is set up once.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip install -q -c constraints.txt

.PHONY: dev train test test-slow lint types imports docs figures bench clean

train: $(VENV)/.run-ready
	$(BIN)/laneway train

# All that the targets below need; they make it themselves.
dev: $(VENV)/.dev-ready

test: $(VENV)/.dev-ready
	$(PYTEST)

test-slow: $(VENV)/.dev-ready
	$(PYTEST) -m slow

lint: $(VENV)/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(VENV)/.dev-ready
	$(BIN)/pyrefly check

imports: $(VENV)/.dev-ready
	$(BIN)/lint-imports

docs: $(VENV)/.dev-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

# README's picture and figures, from the rows in benchmarks/results.
figures: $(VENV)/.dev-ready
	$(BIN)/python docs/hooks/picture.py
	$(BIN)/python docs/hooks/readme.py
	$(BIN)/python docs/hooks/levels_picture.py
	$(BIN)/python docs/hooks/gain_picture.py

bench: $(VENV)/.dev-ready
	$(BIN)/laneway bench layer --quick
	$(BIN)/laneway bench quality --quick

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

KERNELS := $(wildcard src/laneway/connections/kernels/cpu/*.cpp src/laneway/connections/kernels/cpu/*.h src/laneway/memory/counting/*.cpp)

# torch comes first and by its pinned version, so that pip never picks another build of it for a dependency. The CPU kernels are
# compiled once; where there is no compiler, plain PyTorch serves.
$(VENV)/.run-ready: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e .
	$(BIN)/laneway build --optional
	touch $@

$(VENV)/.dev-ready: $(VENV)/.run-ready
	$(PIP) -e '.[data,peers,dev,docs]'
	touch $@

clean:
	rm -rf $(VENV) site
