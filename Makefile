# Two commands matter: `make serve` and `make test`. Both install what they need into .venv at first.

PYTHON ?= python3
CONFIG ?= cluster/config.yaml
HTTP_PORT ?=
DASHBOARD_PORT ?= 8265
RAY_PORT ?= 6379
METRICS_PORT ?= 8266
USERS ?= 16
LOAD_TIME ?= 60s

bin := .venv/bin
installed := .venv/installed
sources := engine kernels deployments loadtests tests
local := $(bin)/python -m deployments.local
run := --config $(CONFIG) $(if $(HTTP_PORT),--http-port $(HTTP_PORT))
starts := --dashboard-port $(DASHBOARD_PORT) --ray-port $(RAY_PORT) --metrics-port $(METRICS_PORT)

.DEFAULT_GOAL := help
.PHONY: help serve stop status fetch test lint format mutants load scheduler-cost matrix compile-kernels gpu-check

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24
	@echo "Variables: PYTHON CONFIG HTTP_PORT DASHBOARD_PORT RAY_PORT METRICS_PORT USERS LOAD_TIME"

serve: $(installed) ## start Ray, deploy, wait until it answers (again: deploys what changed)
	@$(local) serve $(run) $(starts)

stop: $(installed) ## end what serve started
	@$(local) stop $(run)

status: $(installed) ## what runs
	@$(local) status $(run)

fetch: $(installed) ## fetch the model
	@$(local) fetch $(run)

test: lint ## everything that must hold: lint, types, tests
	OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=5000 $(bin)/python -m pytest # threads that spin while they wait starve the servers under test

lint: $(installed) ## ruff and mypy
	$(bin)/ruff check $(sources)
	$(bin)/ruff format --check $(sources)
	$(bin)/mypy

format: $(installed) ## let ruff mend what it can
	$(bin)/ruff check --fix $(sources)
	$(bin)/ruff format $(sources)

mutants: $(installed) ## break scheduler, cache and policies on purpose: every fault must turn a test red
	@$(bin)/python -m tests.mutants

matrix: $(installed) ## every combination of what the scheduler does: no token may differ (about 20 minutes)
	@OMP_WAIT_POLICY=PASSIVE $(bin)/python -m tests.matrix

scheduler-cost: $(installed) ## what planning a step costs, by policy and number of requests
	@$(bin)/python -m loadtests.scheduler_cost

# A machine with a GPU need not have the project installed: python3 with torch and transformers will do.
gpu_python := $(if $(wildcard $(bin)/python),$(bin)/python,$(PYTHON))

gpu-check: ## kernels, tokens and rates on this machine's GPU; without one in Triton's interpreter
	@TRITON_INTERPRET=$$($(gpu_python) -c 'import torch; print(int(not torch.cuda.is_available()))') $(gpu_python) -m engine.gpu_check

compile-kernels: $(installed) ## all Triton kernels for sm_80, sm_90 and gfx942, with registers and shared memory (6 minutes)
	@$(bin)/python -m kernels.compile

load: $(installed) ## load test of what serve started
	@$(bin)/locust -f loadtests/locustfile.py --headless --users $(USERS) --spawn-rate $(USERS) \
		--run-time $(LOAD_TIME) --host http://127.0.0.1:$(or $(HTTP_PORT),8000)

# torch comes first and by its exact version: pip would otherwise choose among all that the others allow.
$(installed): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Choose one: make PYTHON=python3.11")'
	test -x $(bin)/python || $(PYTHON) -m venv .venv
	$(bin)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	$(bin)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	-$(bin)/python -c 'import kernels.cpu_backend' # compiles them, once, so that the first start need not
	@touch $@
