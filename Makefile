# Two commands: `make quickstart` trains a small model on a CPU, `make test` runs every test suite.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# what the quickstart needs (on a machine with an NVIDIA GPU too), and everything there is
PACKAGES := core $(addprefix plugins/,advantages algo-dapo algo-dpo algo-grpo algo-opo algo-ppo algo-sft algo-spin algo-sppo backend-common backend-fsdp hardware-cuda hybrid-engine policy-losses report rollout-hf tasks trackers)
ALL_PACKAGES := core $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/[a-z]*/pyproject.toml)))
TORCH := 2.13.0
CONSTRAINTS := constraints/cpu.txt
# vLLM pins much of what it is installed with, so its tests have an environment of their own
VENV_VLLM ?= .venv-vllm
BIN_VLLM := $(VENV_VLLM)/bin
VLLM_PACKAGES := core $(addprefix plugins/,algo-grpo backend-common backend-fsdp backend-megatron executor-ray hybrid-engine report rollout-vllm tasks)
VLLM_LOCK := constraints/vllm-cpu.txt
# One thread a process: small models run faster so, and processes side by side do not spin.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart test test-vllm lint isolation install clean

quickstart: $(VENV)/.installed
	$(BIN)/drivetrain train examples/quickstart/grpo.yaml --overwrite

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests core/tests plugins/[a-z]*/tests $(ARGS)

# What needs vLLM itself, with its CPU build.
test-vllm: $(VENV_VLLM)/.installed
	$(BIN_VLLM)/python -m pytest plugins/rollout-vllm/tests_vllm $(ARGS)

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

$(VENV_VLLM)/.installed: $(VLLM_LOCK) $(foreach package,$(VLLM_PACKAGES),$(package)/pyproject.toml)
	test "$$(uname -sm)" = "Linux x86_64" || { echo "vLLM's CPU build is tested on Linux x86_64 alone; this is $$(uname -sm)" >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit("vLLM'"'"'s CPU build needs Python 3.11; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV_VLLM)
	$(BIN_VLLM)/pip install --quiet --upgrade pip
	$(BIN_VLLM)/pip install --quiet torch==$(TORCH)+cpu 2>/dev/null \
	  || $(BIN_VLLM)/pip install --quiet torch==$(TORCH)+cpu --index-url https://download.pytorch.org/whl/cpu
	$(BIN_VLLM)/pip install --quiet --no-deps -r $(VLLM_LOCK)
	$(BIN_VLLM)/pip install --quiet -c $(VLLM_LOCK) $(foreach package,$(VLLM_PACKAGES),-e ./$(package))
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) .nox runs
