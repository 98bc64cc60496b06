# Every command of the project; `make` alone lists them.
# Needed: a Rust toolchain, Python 3.10 or newer, gcc, make. All else goes to .venv/ and target/.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FRAMEWORKS := .venv-frameworks
SERVING := .venv-serving
DOCS := .venv-docs
STAMPS := $(VENV)/stamps

# The extension is built for this interpreter, and never links libpython.
check check-rust test: export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
check check-rust test: export PYO3_BUILD_EXTENSION_MODULE := 1

RUST := $(shell find crates python -name '*.rs' -o -name Cargo.toml) Cargo.toml $(wildcard Cargo.lock)
PACKAGE := $(shell find python/deepnvme -name '*.py' -o -name '*.pyi' -o -name py.typed)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test simulate simulate-faults test-frameworks test-serving test-torch test-gpu gpu gpu-bundle check check-rust check-python docs fmt deny fuzz bench perf-check venv wheel release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMPS)/demo $(STAMPS)/wheel ## save, load, generate and train, compared with the tools of today (DEMO_SIZE=2GB, DEMO_DIR=folder)
	@mkdir -p $(or $(DEMO_DIR),target/demo)
	@$(BIN)/deepnvme demo $(or $(DEMO_DIR),target/demo) $(if $(DEMO_SIZE),--size $(DEMO_SIZE))

test: setup ## all tests (SUITES="rust loom simulated valgrind python" names some of them)
	cargo build --quiet --package deepnvme-fake-driver
	@$(BIN)/python scripts/run_tests.py $(SUITES)

test-frameworks: setup $(FRAMEWORKS)/stamp $(FRAMEWORKS)/deepspeed-ops ## tests inside the training libraries, which are installed into .venv-frameworks for that
	@DEEPNVME_TEST_FRAMEWORKS=1 $(FRAMEWORKS)/bin/python -m pytest -o faulthandler_timeout=900 python/tests/frameworks python/tests/pages/test_pages.py

test-serving: setup $(SERVING)/stamp ## tests inside vLLM and SGLang on the CPU, which are installed into .venv-serving for that
	@$(SERVING)/bin/python -m pytest -o faulthandler_timeout=900 python/tests/serving

test-torch: setup ## tests of checkpoints, and fuzz targets, with another release of torch (TORCH=2.10.0), which is installed into .venv-torch
	@test -n "$(TORCH)" || { echo "say which release: make test-torch TORCH=2.10.0"; exit 2; }
	$(BIN)/python scripts/setup.py torch $(TORCH)
	@.venv-torch/bin/python -m pytest python/tests/checkpoint python/tests/fuzz

simulate: ## the storage layer in a simulated world (SEEDS=100000, FIRST_SEED=0; ONLY=stripes for one scenario; TELL=1 tells every call)
	RUSTFLAGS="--cfg simulated" CARGO_TARGET_DIR=target/simulated cargo build --quiet --package deepnvme-simulation --bin simulate
	@$(if $(TELL),DEEPNVME_SIMULATION_TELL=1) target/simulated/debug/simulate --seeds $(or $(SEEDS),100000) --first $(or $(FIRST_SEED),0) $(if $(ONLY),--only $(ONLY))

simulate-faults: ## faults of the past, put back into a copy one at a time: how many seeds each takes to be found
	@$(PYTHON) scripts/simulate_faults.py $(FAULTS)

test-gpu: ## the tests that need an NVIDIA GPU, on this machine
	@scripts/gpu_tests.sh --look
	@$(MAKE) --no-print-directory setup
	@scripts/gpu_tests.sh

gpu: ## on a machine with an NVIDIA GPU: these tests, then the benchmark of tensors on it; under 25 minutes (BENCH="--rows read,write")
	@scripts/gpu_tests.sh --look
	@$(MAKE) --no-print-directory setup
	@scripts/gpu_tests.sh --bench

gpu-bundle: $(STAMPS)/wheel ## the same and the wheel as target/gpu-bundle, for another machine: its run.sh runs them (BASELINES=folder of wheels)
	@$(BIN)/python scripts/gpu_bundle.py $(BASELINES)

check: check-rust check-python ## format, lints, types, references, layers and import cycles, prose, lock files, and licences where cargo-deny is installed

check-rust: venv
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
	@cargo metadata --locked --format-version 1 --manifest-path fuzz/Cargo.toml >/dev/null
	@scripts/deny.sh

check-python: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python/deepnvme python/tests scripts examples
	$(BIN)/python -m mypy.stubtest deepnvme --mypy-config-file pyproject.toml --allowlist scripts/stubtest.allow --ignore-unused-allowlist
	$(BIN)/python scripts/stubs.py --check
	$(BIN)/python scripts/reference.py --check
	$(BIN)/python scripts/tidy.py
	$(BIN)/python scripts/import_cycles.py
	$(BIN)/python scripts/prose.py

docs: $(DOCS)/stamp ## the documentation as pages in site/, with MkDocs, which is installed into .venv-docs for that
	$(DOCS)/bin/python scripts/pictures.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

fmt: setup ## format the Rust and the Python code
	cargo fmt --all
	$(BIN)/ruff format .

deny: ## licences, sources and advisories of all dependencies (compiles cargo-deny once, some minutes)
	@scripts/deny.sh --install

fuzz: setup ## give each parser what libFuzzer finds, for FUZZ_SECONDS (60) each
	@nice -n 19 $(BIN)/python scripts/fuzz.py

perf-check: setup ## a short set of benchmarks against the ratios on record for this kind of machine; four minutes (RECORD=1 records them)
	@cd benchmarks && ../$(BIN)/python -m perfcheck $(if $(RECORD),--record)

bench: ## compare with fio, DeepSpeed, Python and numpy (a project of its own: see benchmarks/)
	@$(MAKE) -C benchmarks PYTHON=$(abspath $(shell command -v $(PYTHON)))

release-check: ## the steps of a release on this machine, without publishing (STEPS="wheel symbols"; TAG=v0.1.0; each says done, skipped or failed)
	@$(PYTHON) scripts/release_check.py $(if $(TAG),--tag $(TAG)) $(STEPS)

venv: $(STAMPS)/venv
wheel: $(STAMPS)/wheel ## build the release wheel into target/wheels and install it in .venv
setup: $(STAMPS)/dev $(STAMPS)/wheel ## make .venv with everything the tests need

clean: ## remove everything that was built or installed
	rm -rf $(VENV) $(FRAMEWORKS) $(SERVING) $(DOCS) .venv-torch site target dist wheels .pytest_cache .mypy_cache .ruff_cache
	@if [ -f benchmarks/Makefile ]; then $(MAKE) -C benchmarks clean; fi

# Set-up in steps, each done again only when what it was made from has changed.
$(STAMPS)/venv:
	$(PYTHON) scripts/setup.py venv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml
	$(BIN)/python scripts/setup.py extras dev torch deepspeed
	@touch $@

$(STAMPS)/demo: $(STAMPS)/venv pyproject.toml
	$(BIN)/python scripts/setup.py extras demo
	@touch $@

$(STAMPS)/wheel: $(STAMPS)/dev $(RUST) $(PACKAGE)
	$(BIN)/python scripts/setup.py wheel
	@touch $@

$(FRAMEWORKS)/stamp: $(STAMPS)/dev python/tests/frameworks/requirements.txt
	$(BIN)/python scripts/setup.py frameworks python/tests/frameworks/requirements.txt
	@touch $@

# What training on our op is compared with; compiled once, in three to fifteen minutes. Without it those tests are skipped.
$(FRAMEWORKS)/deepspeed-ops: $(FRAMEWORKS)/stamp
	@$(FRAMEWORKS)/bin/python python/tests/frameworks/build_deepspeed_ops.py
	@touch $@

$(DOCS)/stamp: $(STAMPS)/venv pyproject.toml
	$(BIN)/python scripts/setup.py docs
	@touch $@

$(SERVING)/stamp: $(STAMPS)/dev python/tests/serving/requirements.txt python/tests/serving/servers.txt
	$(BIN)/python scripts/setup.py serving python/tests/serving
	@touch $@
