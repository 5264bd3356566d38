# Words for every day, and the two commands of the README. VENV names the virtual environment.
VENV ?= .venv
BIN := $(VENV)/bin

install: $(BIN)/reclaim            ## the environment, with the tools
$(BIN)/reclaim: pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[dev]'
	@touch $@

test: install                      ## every test
	$(BIN)/python -m pytest -n auto --dist loadfile

OLDEST := .venv-oldest
oldest:                            ## every test with the oldest packages that pyproject.toml allows
	python3 -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q uv
	$(OLDEST)/bin/uv pip compile -q --no-deps --resolution lowest-direct pyproject.toml -o $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install -q -c $(OLDEST)/oldest.txt -e '.[dev]'
	$(OLDEST)/bin/python -m pytest -n auto --dist loadfile -W ignore::DeprecationWarning \
		-W ignore::PendingDeprecationWarning -W ignore::FutureWarning

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

.PHONY: install test oldest quick lint fix docs notebook demo
