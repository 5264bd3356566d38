# Four words for every day, and the two commands of the README. VENV names the virtual environment.
VENV ?= .venv
BIN := $(VENV)/bin

install: $(BIN)/reclaim            ## the environment, with the tools
$(BIN)/reclaim: pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

test: install                      ## every test
	$(BIN)/python -m pytest -n auto --dist loadfile

quick: install                     ## tests but for the slow ones
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow'

lint: install                      ## format, lint, types, import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: install                       ## what can be mended by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: install                      ## the site, in site/; a warning or a broken link is an error
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs/site . site

notebook: install                  ## the outputs of docs/notebook.ipynb
	$(BIN)/python tests/test_notebook.py

demo: install                      ## the whole way on a synthetic cell
	$(BIN)/reclaim demo

.PHONY: install test quick lint fix docs notebook demo
