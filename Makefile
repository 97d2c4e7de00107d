# One front door: `make` alone lists what there is.

VENV := .venv
BIN := $(VENV)/bin
# What .venv was made for, so that no other target makes it anew.
profile ?= $(or $(shell sed -n 's|^requirements/\([a-z]*\)\.txt .*|\1|p' $(VENV)/.packages 2>/dev/null),cpu)
only ?= *
tier ?= parts

.DEFAULT_GOAL := help
.PHONY: help setup frameworks browser trace-tools alfworld-engine bigcodebench next-verl demo small-model test test-trainings test-all test-fast check recordings soak gpu-proof lock audit clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv and install the pinned packages (profile=cpu or gpu); again: nothing to do
	@./setup.sh $(profile)

frameworks: setup ## add the frameworks that agents/frameworks plays in (only=langgraph: that one)
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --no-deps --require-hashes --compile-bytecode \
		$(addprefix --requirements ,$(wildcard requirements/frameworks/$(only).txt))
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/mcp-1
	@VIRTUAL_ENV=build/mcp-1 $(BIN)/uv pip install --quiet --no-deps --require-hashes --requirements requirements/mcp-1.txt
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > build/mcp-1/lib/python3.12/site-packages/beside.pth
	@! command -v npm >/dev/null || npm ci --silent --no-audit --no-fund --prefix tests/recipe/clients || \
		echo "frameworks: without the clients in JavaScript, whose tests are skipped"

browser: setup ## add a browser (Qt's Chromium, 400 MB), in which the tests open a report
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --no-deps --require-hashes --requirements requirements/browser.txt

trace-tools: setup ## add Phoenix, MLflow and a collector (900 MB, apart), in which the tests look at spans
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/trace-tools
	@VIRTUAL_ENV=build/trace-tools $(BIN)/uv pip install --quiet --no-deps --require-hashes --requirements requirements/trace-tools.txt

alfworld-engine: setup ## add ALFWorld's own engine (330 MB, apart; cmake and g++), which the tests compare ours with
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/alfworld-engine
	@VIRTUAL_ENV=build/alfworld-engine $(BIN)/uv pip install --quiet --no-deps --requirements requirements/alfworld-engine.txt

bigcodebench: setup ## add what BigCodeBench's programs import (740 MB, apart), in versions of their time
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/bigcodebench
	@VIRTUAL_ENV=build/bigcodebench $(BIN)/uv pip install --quiet --no-deps --require-hashes --requirements requirements/bigcodebench.txt

next-verl: setup ## add the next verl and vLLM (400 MB, apart), with which a test trains two steps
	@$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python build/verl-0.9
	@VIRTUAL_ENV=build/verl-0.9 $(BIN)/uv pip install --quiet --no-deps --require-hashes --compile-bytecode \
		--requirements requirements/verl-0.9.txt
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> build/verl-0.9/lib/python3.12/site-packages/beside.pth

demo: setup ## see the small model explore, write notes and learn, on a CPU
	$(BIN)/empo2 demo

# Not needed by anyone who uses the model: the result is in the repository (small_model/adapter).
small-model: setup ## make the small model's LoRA anew from scripted play, with its checksums
	$(BIN)/python -m empo2.small_model.make

# CONTRIBUTING.md has the tiers of tests in one table.
PYTEST = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# One worker begins with the trainings (tests/conftest.py). At the end, what was skipped is listed with the reason.
test: frameworks ## run the tests of all that README says, the real stack included
	$(PYTEST) -r fEs --durations=25 -m "not rare"

test-trainings: frameworks trace-tools next-verl ## run the long whole-stack tests: LoRA, async, three hosts, notebook, gpu-proof, trace tools
	$(BIN)/python -m pytest -r fEs --durations=5 -m "rare and stack"

test-all: test trace-tools ## and what is long, or a combination that hardly anyone uses
	$(PYTEST) -r fEs --durations=25 -m "rare"

# These tests wait as long as they compute, and none needs another one's server.
test-fast: setup ## run the tests that need neither the real stack nor much time
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal -r fE -m "not stack and not slow and not rare"

# pyright follows folders, not the import hook of an editable install: build/links shows it the package `empo2`.
check: frameworks ## lint, formatting and types
	@mkdir -p build/links/empo2
	@ln -sfn -t build/links/empo2 $(patsubst %/py.typed,../../../%,$(wildcard */py.typed))
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

recordings: setup ## play the coding agents of docs/agents.md, and record anew what they send (only=claude: that one)
	EMPO2_RECORD=1 $(BIN)/python -m pytest -r fEs tests/recipe/test_coding_agents.py $(if $(filter-out *,$(only)),-k $(only))

soak: setup ## play 10,000 episodes while things break; what is lost, and how the gateway grows (not in CI)
	$(BIN)/python -m tests.soak

# The packages for GPUs, unless another profile is asked for: those of `setup` alone would replace them.
gpu-proof: profile := gpu
gpu-proof: setup ## prove on a GPU what the tests prove on a CPU: tier=parts (two minutes), stack (ten) or learning (hours)
	$(BIN)/python -m gpu_proof $(tier) $(if $(filter cpu,$(profile)),--device cpu)

LOCK = cd requirements && ../$(BIN)/uv pip compile --quiet --python-version 3.12 --no-annotate --generate-hashes \
	--custom-compile-command "make lock" --overrides overrides.txt --excludes excludes.txt

lock: setup ## resolve requirements/*.in anew into the pinned lists
	$(LOCK) --excludes excludes-cpu.txt cpu.in --output-file cpu.txt
	$(LOCK) gpu.in --output-file gpu.txt
	$(LOCK) --no-deps verl-0.9.in --output-file verl-0.9.txt
	$(LOCK) browser.in --output-file browser.txt
	$(LOCK) trace-tools.in --output-file trace-tools.txt
	$(LOCK) alfworld-engine.in --output-file alfworld-engine.txt
	$(subst --overrides overrides.txt,,$(LOCK)) bigcodebench.in --output-file bigcodebench.txt
	for name in $(basename $(notdir $(wildcard requirements/frameworks/*.in))); do \
		($(LOCK) --overrides overrides-frameworks.txt --constraints cpu.txt frameworks/$$name.in | \
			grep -vxFf cpu.txt > frameworks/$$name.txt) || exit; \
	done

# pip-audit passes over what the database does not have, such as builds for CPUs, and ends well where it has reached none:
# so it is asked about one package alone first.
AUDIT = $(BIN)/uv tool run pip-audit --no-deps --disable-pip --requirement
audit: $(BIN)/uv ## ask PyPI's advisories about the pinned packages (needs a network); SECURITY.md says what holds here
	@mkdir -p build && grep -o '^httpx==[0-9.]*' requirements/cpu.txt > build/audit.txt
	@$(AUDIT) build/audit.txt --strict >/dev/null 2>&1 || \
		{ echo "audit: nothing was looked at: pypi.org, or pip-audit from there, cannot be reached" >&2; exit 1; }
	for list in cpu gpu; do $(AUDIT) requirements/$$list.txt || failed=1; done; exit $${failed:-0}

$(BIN)/uv:
	@./setup.sh $(profile)

clean: ## remove what was built and installed; runs/ stays
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
