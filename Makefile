# Two commands: `make quickstart` trains a small model on a CPU, `make test` runs every test suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# what the quickstart needs (on a machine with an NVIDIA GPU too), and everything there is
PACKAGES := core $(addprefix plugins/,advantages algo-dapo algo-dpo algo-grpo algo-opo algo-ppo algo-sft algo-spin algo-sppo backend-common backend-fsdp hardware-cuda hybrid-engine policy-losses report rollout-hf tasks trackers)
ALL_PACKAGES := core $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/[a-z]*/pyproject.toml)))
TORCH := 2.13.0
CONSTRAINTS := constraints/cpu.txt
# One thread a process: small models run faster so, and processes side by side do not spin.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test lint isolation install clean

quickstart: $(VENV)/.installed
	$(BIN)/drivetrain train examples/quickstart/grpo.yaml --overwrite

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests core/tests plugins/[a-z]*/tests $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy core/src $(wildcard plugins/*/src)

isolation: $(VENV)/.installed-test
	$(BIN)/nox --session isolation

install: $(VENV)/.installed

# CPU builds of torch where there is no GPU: from pip's own sources, or else from PyTorch's index.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("drivetrain needs Python 3.10 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	if nvidia-smi >/dev/null 2>&1 || [ "$$(uname -sm)" != "Linux x86_64" ]; then $(BIN)/pip install --quiet torch; \
	else $(BIN)/pip install --quiet torch==$(TORCH)+cpu 2>/dev/null \
	  || $(BIN)/pip install --quiet torch==$(TORCH)+cpu --index-url https://download.pytorch.org/whl/cpu; fi
	touch $@

$(VENV)/.installed: $(VENV)/.torch $(CONSTRAINTS) $(wildcard pyproject.toml core/pyproject.toml plugins/*/pyproject.toml)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) $(foreach package,$(PACKAGES),-e ./$(package))
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-dev.txt
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) $(foreach package,$(ALL_PACKAGES),-e ./$(package)) -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) .nox runs
