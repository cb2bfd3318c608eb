# `make help` lists the targets; each one works alone on a fresh clone.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NPM_CI := npm ci --no-audit --no-fund --prefer-offline
MEMBERS := common operator trainer analyzer
SOURCES := common/src operator/src trainer/src analyzer/src csrc/src
RANK_PACKAGES = $(addprefix $(VENV)/lib/python*/site-packages/,megatron numpy pyarrow sympy torch)
COMMAND_PACKAGES = $(addprefix $(VENV)/lib/python*/site-packages/,_pytest aiohttp anyio cachetools execnet fastapi httpcore httpx hypothesis \
  jinja2 kopf kubernetes_asyncio openai opentelemetry playwright prometheus_client pydantic schemathesis starlette uvicorn websockets xdist yaml)
PY_DIRS := $(SOURCES) tests bench scripts
JOBS ?= 2
# More than cores: ranks of a test wait for each other, and tests for processes that start.
WORKERS ?= 3
# Tests start hundreds of interpreters, and pytest rewrites 300 files; without bytecode all of that is compiled each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
PYTEST_FLAGS ?=
.PHONY: help setup demo test test-full test-py durations test-cpp test-ui lint format generate verify bench build constraints clean

help: ## List the targets
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(BIN)/.ready frontend/dist/index.html ## Python environment, native extension and page

$(BIN)/.ready: constraints.txt pyproject.toml $(wildcard */pyproject.toml) csrc/CMakeLists.txt $(shell find csrc/src csrc/bindings csrc/include -name "*.[ch]pp" 2>/dev/null)
	scripts/system_packages.sh build
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --build-constraints constraints.txt --group dev -e csrc $(addprefix -e ,$(MEMBERS))
# What ranks, commands and tests import: where Python may not write bytecode, and where several start at once, each process
# would compile it anew.
	$(BIN)/python -m compileall -q -j $(JOBS) -x '/(tests?|testing)/' $(RANK_PACKAGES) $(COMMAND_PACKAGES) $(SOURCES) >/dev/null 2>&1 || true  # templates are no code
	touch $@

frontend/node_modules/.ready: frontend/package-lock.json
	cd frontend && $(NPM_CI)
	touch $@

FRONTEND_SOURCES := $(shell find frontend/src frontend/index.html frontend/vite.config.ts -type f 2>/dev/null)
frontend/dist/index.html: frontend/node_modules/.ready $(FRONTEND_SOURCES)
	cd frontend && npm run build
	touch $@

demo: setup ## Train a small GPT on this machine, make a rank slow, and see it named
	$(BIN)/python scripts/demo.py

test: ready ## What must hold for each commit: Python, C++, page (about 10 minutes on two cores)
	$(MAKE) --keep-going -j1 test-together test-e2e

test-py: ready
	$(MAKE) --keep-going -j1 test-files test-e2e

# The tests of C++ wait nine tenths of their time for deadlines, and those of the page for a single process that transforms
# it: next to the files of Python they use processor time that would be idle.
.PHONY: test-together
test-together:
	$(MAKE) --keep-going -j3 test-files test-others

# One is downloaded while the other is compiled; apt-get first, as only one may run.
.PHONY: ready
ready:
	scripts/system_packages.sh build test native
	$(MAKE) -j2 test-tools setup

.PHONY: test-tools
test-tools:
	scripts/kube_tools.sh api
	scripts/kube_tools.sh helm

# Separate targets of a second make, so that test-e2e also runs after failed tests, but not after an interruption. It runs
# alone, because it judges measured times.
.PHONY: test-files test-e2e
test-files:
	MAKEFLAGS= $(BIN)/python -m pytest -n $(WORKERS) --ignore tests/e2e --ignore tests/gpu $(PYTEST_FLAGS)

test-e2e:
	$(BIN)/python -m pytest tests/e2e --timeout 600

durations: ## Run the tests of Python and write tests/durations.json, by which they are ordered
	$(MAKE) test-py PYTEST_FLAGS=--record-durations

OLDEST_KUBERNETES := $(patsubst %,tests/integration/kube/test_%.py,admission api authors crd depth_policy lease operator_edits operator_hub \
  operator_life operator_lost operator_objects operator_serve operator_service operator_versions operator_writes pod_groups \
  render_objects rules rules_later status)

test-full: export MEGATRONAPP_FULL := 1
test-full: test-full-tools test ## Those of test and all that are too long for it; Kueue, schedulers, kwok and Kubernetes 1.30 (30 minutes more the first time)
	export KUBEBUILDER_ASSETS && KUBEBUILDER_ASSETS=$$(scripts/kube_tools.sh api-1.30) && $(BIN)/python -m pytest -n $(WORKERS) $(OLDEST_KUBERNETES)

.PHONY: test-full-tools
test-full-tools:
	for tool in cluster kueue kwok release scheduler-plugins api-1.30; do scripts/kube_tools.sh $$tool || exit; done

# The output of each is printed when it has ended, not between lines of the tests of Python.
.PHONY: test-others
test-others:
	$(MAKE) --keep-going --output-sync=target test-cpp test-ui

test-cpp: $(BIN)/.ready
	scripts/system_packages.sh native
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/native_checks.sh asan
	[ -z "$$MEGATRONAPP_FULL" ] || PATH="$(CURDIR)/$(BIN):$$PATH" scripts/native_checks.sh test
	[ -z "$$MEGATRONAPP_FULL" ] || PATH="$(CURDIR)/$(BIN):$$PATH" scripts/native_checks.sh tsan

test-ui: frontend/node_modules/.ready
	cd frontend && npm test

lint: $(BIN)/.ready frontend/node_modules/.ready ## ruff, mypy, import-linter, gates of size, words and commit subjects, eslint, vue-tsc, clang-format, clang-tidy
	scripts/system_packages.sh native lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PY_DIRS)
	$(BIN)/lint-imports
	$(BIN)/python scripts/size_gate.py
	$(BIN)/python scripts/house_gate.py --history
	cd frontend && npm run lint
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/native_checks.sh lint

format: $(BIN)/.ready frontend/node_modules/.ready ## Format Python, C++ and TypeScript
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	cd frontend && npm run format
	clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.hpp')

generate: $(BIN)/.ready frontend/node_modules/.ready ## Write the generated files (CRD, reference, wire vectors, OpenAPI, TypeScript types)
	$(BIN)/python scripts/generate.py
	$(BIN)/python scripts/openapi.py
	cd frontend && npm run generate

verify: $(BIN)/.ready frontend/node_modules/.ready ## Fail if a generated file drifted from its source
	$(BIN)/python scripts/generate.py --check
	$(BIN)/python scripts/openapi.py --check
	cd frontend && npm run verify

bench: setup ## Short forms of the measurements; full counts: docs/benchmarks.md
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/native_checks.sh bench
	$(BIN)/python bench/bench_ring.py
	$(BIN)/python bench/bench_trace_host.py
	$(BIN)/python bench/bench_detect.py --runs 2
	$(BIN)/python bench/bench_hub.py --seconds 10
	$(BIN)/python bench/bench_layouts.py --steps 10

bench-demo: setup ## Named right and false alarms on warm jobs (about an hour)
	$(BIN)/python bench/bench_demo.py

.PHONY: fuzz
fuzz: setup ## 50,000 generated histories of the operator's plan (about 15 minutes of one processor)
	$(BIN)/python bench/fuzz_plan.py --histories 50000

.PHONY: bench-operator
bench-operator: setup ## The operator with 1,000 to 10,000 pods of kwok, beside the Job controller, JobSet and Kubeflow Trainer (about 25 minutes)
	for tool in cluster kwok jobset trainer; do scripts/kube_tools.sh $$tool || exit; done
	$(BIN)/python bench/bench_operator.py

build: setup ## Wheels of the five distributions and the page
	mkdir -p dist
	for part in $(MEMBERS) csrc; do $(BIN)/uv build --quiet --wheel --build-constraints constraints.txt --out-dir dist $$part; done

images: frontend/dist/index.html ## Images of operator, analyzer and trainer, with docker or buildah (images/README.md)
	scripts/build_images.sh

e2e: setup ## A real Kubernetes of two nodes on this machine (root, 35 GB, 40 min the first time): images, chart, gang, pages
	scripts/system_packages.sh e2e
	MEGATRONAPP_E2E=1 $(BIN)/python -m pytest tests/e2e/kubernetes --timeout 3600

release: setup ## Push images with SBOM and provenance, and the chart: VERSION=1.2.3 REGISTRY=host/path (docs/releasing.md); DRY_RUN=1 pushes nothing
	@$(BIN)/python scripts/release.py --version "$(VERSION)" --registry "$(REGISTRY)" $(if $(DRY_RUN),--dry-run) \
	  $(if $(PLATFORMS),--platforms "$(PLATFORMS)") $(if $(IMAGES),--images "$(IMAGES)") $(if $(SKIP_BUILD),--skip-build) \
	  $(if $(BUILDER_ID),--builder-id "$(BUILDER_ID)")

.PHONY: images e2e release
constraints: $(BIN)/.ready ## Export the exact versions of this environment, and the hashes that images install by
	{ $(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | grep -v '^pip=='; \
	  printf '%s\n' cmake ninja | $(BIN)/uv pip compile --quiet --no-header --no-annotate -; } | LC_ALL=C sort > constraints.tmp
	{ echo "# Exact versions; written by 'make constraints'."; cat constraints.tmp; } > constraints.txt
	rm constraints.tmp
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/lock_images.py

clean: ## Remove everything that these targets made
	rm -rf $(VENV) dist .demo frontend/dist frontend/node_modules csrc/build
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
