# `make demo` sets everything up and runs the main job; `make test` sets up and runs all checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench prove clean

demo: $(VENV)/.installed
	$(BIN)/toast plan t2b --mesh data=4,model=4 --hardware tpu-v5e
	$(BIN)/toast verify t2b --mesh data=4,model=2

test: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 $(TESTS)

bench: $(VENV)/.tested
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/rules.py
	$(BIN)/python benchmarks/scaling.py

prove: $(VENV)/.tested
	$(BIN)/python benchmarks/prove.py

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TOAST needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.tested: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,libraries]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
