# Two commands: `make demo` and `make test`. `make demo MODEL=smollm2` runs the loop on a real model. Needs Python 3.11+, make and a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
STAMP := $(VENV)/.installed

# Hugging Face libraries look for a hub at every load; nothing here needs one. Unset to use models by name.
export HF_HUB_DISABLE_TELEMETRY = 1
export TOKENIZERS_PARALLELISM = false
# Servers, workers and trainings start sooner when the bytecode of the project is kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test test-all test-fast suite campaign serve lint docs size clean

demo: $(STAMP)-rl
	$(BIN)/python manage.py migrate --verbosity 0
	$(BIN)/python manage.py demo $(if $(MODEL),--model $(MODEL))

# Types are checked beside the tests: they take a minute of one core.
test: $(STAMP)-dev
	$(MAKE) --jobs 2 lint suite

# Also the campaigns: fuzzing, simulations, every export, installation from a wheel. Before a release, and in CI.
test-all: test
	$(MAKE) campaign

# Units alone: no database, no training, no browser, nothing that takes a moment.
test-fast: $(STAMP)-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal \
	  -m "not slow and not campaign and not django_db and not training and not browser and not postgres and not prepares"

suite: $(STAMP)-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "not campaign"

campaign: $(STAMP)-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m campaign

serve: $(STAMP)-rl
	$(BIN)/python manage.py migrate --verbosity 0
	$(BIN)/python manage.py serve --port $(PORT)

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site, in build/site; a link that leads nowhere fails it.
docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, found {sys.version.split()[0]}; run make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# A stamp per requirements file: installed once, again only when the file changes.
$(STAMP)-rl: $(VENV)/bin/python requirements.txt requirements-rl.txt
	$(BIN)/python -m pip install --prefer-binary -r requirements-rl.txt
	@touch $@

$(STAMP)-dev: $(VENV)/bin/python requirements.txt requirements-rl.txt requirements-dev.txt requirements-docs.txt requirements-extras.txt
	$(BIN)/python -m pip install --prefer-binary -r requirements-dev.txt
	@touch $@ $(STAMP)-rl $(STAMP)-docs

$(STAMP)-docs: $(VENV)/bin/python requirements-docs.txt
	$(BIN)/python -m pip install --prefer-binary -r requirements-docs.txt
	@touch $@

# Lines, modules, types and the files that a training and an answer pass through.
size: $(STAMP)-rl
	$(BIN)/python tools/size.py --walks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
