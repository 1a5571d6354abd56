# `make demo` sets everything up and runs the main job; `make test` sets up and runs all checks;
# `make docs` builds the documentation into docs/_build/html.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test docs bench prove clean

demo: $(VENV)/.installed
	$(BIN)/toast plan t2b --mesh data=4,model=4 --hardware tpu-v5e
	$(BIN)/toast verify t2b --mesh data=4,model=2

test: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 $(TESTS)

docs: $(VENV)/.documented
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,docs,libraries]'
	touch $@ $(VENV)/.installed $(VENV)/.documented

$(VENV)/.documented: $(VENV)/.created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist docs/_build docs/_generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
