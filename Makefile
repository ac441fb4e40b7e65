# Two commands do everything on a fresh machine (CPU by default):
#   make demo   a real SGLang engine answers three chat prompts, without and with PEAGLE
#   make test   the test suite
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SGLANG := 0.5.23

# One thread per process: test engines are forks, and a machine for tests has few cores.
TEST_ENV := SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

.PHONY: demo test test-full test-gpu setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements/cpu.txt pyproject.toml
	@echo "== setting up $(VENV) (about 4 minutes, 8 GB)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.14.1 torchvision==0.29.1
	$(BIN)/pip install -q -r requirements/cpu.txt
	$(BIN)/pip install -q --no-deps sglang==$(SGLANG)
	$(BIN)/pip install -q --no-deps -e .
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "not slow" tests

test-full: setup
	$(TEST_ENV) $(BIN)/python -m pytest -q tests

# On a machine with a CUDA GPU, in the environment that holds SGLang and this package.
test-gpu:
	$(PYTHON) -m pytest -q -m gpu tests

clean:
	rm -rf $(VENV) .cache
