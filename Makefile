# `make demo` sets everything up and runs the main job; `make test` sets up and runs all tests but the
# slow ones, which `make prove` runs; `make quick` runs those that take two minutes; `make docs` builds
# the documentation into docs/_build/html.
# The environment is made by the newest Python from 3.11 to 3.13 that runs here, or by
# `make PYTHON=...`; `make VENV=...` makes another one.
PYTHON ?= $(or $(shell .ci/pythons | head -n 1),python3)
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# Tests start many processes; without this, each compiles the modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick lint docs bench validate prove clean

demo: $(VENV)/.installed
	$(BIN)/toast plan t2b --mesh data=4,model=4 --hardware tpu-v5e --safety 0.95
	$(BIN)/toast verify t2b --mesh data=4,model=2

test: lint
	$(PYTEST) $(TESTS)

# Lint, types, and a third of each file's tests: quick and slow ones, but none of over 0.6 seconds.
quick: lint
	$(PYTEST) --quick $(TESTS)

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.documented
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

bench: $(VENV)/.tested
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/rules.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/ask.py
	$(BIN)/python benchmarks/dispatch.py

# Published training steps against predictions; fails if an error is two points above the smallest one.
validate: $(VENV)/.installed
	$(BIN)/python benchmarks/published.py

prove: $(VENV)/.tested $(VENV)/.libraries
	$(PYTEST) -m slow
	$(BIN)/python benchmarks/prove.py

# An environment that is there stays; it is not made over with another Python.
$(VENV)/.created:
	python=$(PYTHON); [ ! -e $(BIN)/python ] || python=$(BIN)/python; \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "TOAST needs Python 3.11 to 3.13; name one by make PYTHON=... and another folder by VENV=...")'
	[ -e $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

# Of these packages, tests import a small part, which is compiled at its first import.
$(VENV)/.tested: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[test,docs,libraries,dask]'
	touch $@ $(VENV)/.installed $(VENV)/.documented

# Their tests are skipped if a library cannot be installed, or does not fit this Python or JAX.  Of
# PyTorch, only the wheel for CPUs is installed: it needs no CUDA.
$(VENV)/.libraries: $(VENV)/.tested
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[libraries-more]'
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--extra-index-url https://download.pytorch.org/whl/cpu 'torch==2.13.0+cpu' -e '.[torch]'
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	touch $@

$(VENV)/.documented: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .venv-oldest build dist docs/_build docs/_generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
