# berth's commands. Needs Python 3.11 or newer, make, git and a C compiler; everything else is fetched or built.
SHELL := /bin/bash
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .tools/bin/uv)
RUN := $(UV) run --locked --quiet
FAST := not stack and not node and not faults

# Tests start Python hundreds of times: where it may not keep what it compiled, each compiles half a library anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-node lint format bench crds proto native native-check clean

help: ## show these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/installed ## GPUWorkloads from a real trace, on a real control plane with simulated nodes
	$(RUN) berth demo $(ARGS)

# Tests that start something wait most of their time, so that two sorts go on side by side: those that kill processes
# and then those of the control plane; those that start nothing and then those of a real kubelet. Killing takes both
# cores, and is over before the kubelet's begin. What the second two say follows. 5: of one sort there is none.
test: .venv/installed ## every test that this machine can run; what it skips is named and counted at the end
	@mkdir -p build
	@( nice -n 5 $(RUN) pytest -q -p no:cacheprovider -m "$(FAST)" $(ARGS) >build/test-fast.log 2>&1; fast=$$?; \
	   $(RUN) pytest -q -p no:cacheprovider -m node $(ARGS) >build/test-node.log 2>&1; node=$$?; \
	   for each in $$fast $$node; do [ $$each = 0 ] || [ $$each = 5 ] || exit 1; done ) & beside=$$!; \
	trap 'pkill -P $$beside' INT TERM; \
	$(RUN) pytest -q -p no:cacheprovider -m "faults and not node" $(ARGS); faults=$$?; [ $$faults = 5 ] && faults=0; \
	$(RUN) pytest -q -p no:cacheprovider -m "stack and not faults and not node" $(ARGS); \
	stack=$$?; [ $$stack = 5 ] && stack=0; \
	wait $$beside; beside=$$?; \
	echo; echo "The tests that start nothing:"; cat build/test-fast.log; \
	echo; echo "The tests of a real kubelet:"; cat build/test-node.log; \
	exit $$((faults ? faults : stack ? stack : beside))

test-fast: .venv/installed ## unit, property and replay tests only: minutes, nothing is built or started
	$(RUN) pytest -q -m "$(FAST)" $(ARGS)

test-node: .venv/installed ## only what needs a real kubelet (root, Debian)
	$(RUN) pytest -q -m node $(ARGS)

lint: .venv/installed ## ruff, mypy --strict, the rooms' import contracts, generated files up to date
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) lint-imports
	$(RUN) python -m crds.generate --check
	$(RUN) python -m nodeworkers.rpc.generate --check

format: .venv/installed ## put the code into shape
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

bench: .venv/installed ## the benchmarks, each beside its peer; JSON in build/
	@mkdir -p build
	$(RUN) python -m benchmarks.placement --json build/placement.json
	$(RUN) python -m benchmarks.strategies --json build/strategies.json
	$(RUN) python -m benchmarks.predictions --json build/predictions.json
	$(RUN) python -m benchmarks.sharding --count 10000 --busy 2000 --json build/sharding.json
	$(RUN) python -m benchmarks.admission --json build/admission.json
	$(RUN) python -m benchmarks.gangs --json build/gangs.json
	$(RUN) python -m benchmarks.caches --caches 20 --nodes 50 --json build/caches.json
	$(RUN) python -m benchmarks.kueue --scale 0.1 --json build/kueue.json
	$(RUN) python -m benchmarks.extraction --json build/extraction.json
	$(RUN) python -m benchmarks.seat_proxy --json build/seat_proxy.json
	$(RUN) python -m benchmarks.devices --json build/devices.json
	[ "$$(id -u)" != 0 ] || $(RUN) python -m benchmarks.device_kills --json build/device_kills.json
	[ "$$(id -u)" != 0 ] || $(RUN) python -m benchmarks.device_deaths --json build/device_deaths.json
	[ "$$(id -u)" != 0 ] || $(RUN) python -m benchmarks.publish --cycles 9000 --json build/publish.json

crds: .venv/installed ## write deploy/crds/ anew from the models in crds/
	$(RUN) python -m crds.generate

proto: .venv/installed ## write nodeworkers/rpc/ anew from the interfaces in proto/
	$(RUN) python -m nodeworkers.rpc.generate

native: .venv/installed ## build the seat proxy (Rust) into the cache; tests do so by themselves where there is cargo
	$(RUN) python -m stack.native

native-check: ## rustfmt, clippy and unit tests of native/
	cd native && cargo fmt --check
	cd native && cargo clippy --locked --all-targets -- -D warnings
	cd native && cargo test --locked --quiet

clean: ## remove what these targets made here (not the built tools in the cache, not data folders)
	rm -rf .venv .tools build dist native/target .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.tools/bin/uv:
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet "uv>=0.8,<1"

.venv/installed: pyproject.toml uv.lock | $(filter .tools/bin/uv,$(UV))
	$(UV) sync --locked --quiet --compile-bytecode
	@touch $@
