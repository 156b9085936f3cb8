# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
COMPILED := build/compiled
# What the demo downloads stays in this directory; the lab's file systems are shared by all checkouts (~/.cache/dynctl).
install demo $(VENV)/.installed: export DYNCTL_CACHE ?= $(CURDIR)/.cache

.PHONY: demo test test-compiled check fuzz wheel lab lab-vllm bench-router lock clean install bench-plan bench-search bench-simulate

install: $(VENV)/.installed

# Without Python warnings: setuptools has a long one about editable installs, which are meant here.
$(VENV)/.installed: pyproject.toml requirements/dev.txt
	$(PYTHON) -c 'import sys; sys.exit("dynctl needs Python 3.11 or newer; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(BIN)/python scripts/fetch_wheels
	touch $@

demo: install  ## plan, up, bench, a look at top and down on this machine; no GPU needed
	$(BIN)/dynctl demo $(if $(KEEP),--keep) $(DEMO_FLAGS)

test: install  ## every test; as root on Debian or Ubuntu also the lab
	scripts/lab_setup
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-compiled: $(COMPILED)/.made  ## the way of requests and KV events, compiled as in a wheel
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(COMPILED) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not source" tests/http1 tests/kv tests/relay tests/router

wheel: $(COMPILED)/.made  ## a wheel with compiled modules in build/wheel: less CPU time per request; needs a C compiler
	@ls build/wheel/*.whl

# What a wheel installs, beside the working tree; made anew, since a module that is gone would live on in old objects.
$(COMPILED)/.made: $(VENV)/.installed setup.py pyproject.toml $(shell find dynctl -not -path '*__pycache__*')
	rm -rf build
	DYNCTL_COMPILE=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w build/wheel .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(COMPILED) build/wheel/*.whl
	touch $@

check: install  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: install  ## 100,000 mutated captures of every tool
	$(BIN)/python benchmarks/fuzz_captures.py --count 100000

lab: install  ## the lab's tests alone: real hosts without hardware (root)
	scripts/lab_setup
	$(BIN)/python -m pytest tests/lab

lab-vllm: install  ## real vLLM engines with NIXL on lab hosts, on CPUs (root; installs about 4 GB)
	scripts/lab_setup
	scripts/lab_vllm

bench-router: export PYTHONPATH = $(CURDIR)/$(COMPILED)
bench-router: $(COMPILED)/.made  ## the router beside its rivals in one run, and the bounds it must hold (installs the rivals once; about an hour; BENCH=micro for one suite)
	$(BIN)/python benchmarks/router_bench.py $(BENCH)
	$(if $(BENCH),,$(BIN)/python benchmarks/kv_ingest.py)

bench-plan: install  ## errors and bands of the estimates against public points, and a rival's on the same rows (about 3 minutes)
	$(BIN)/python benchmarks/plan_accuracy.py $(BENCH)

bench-search: install  ## how long a plan takes: 64 hosts of 8 GPUs within 3 s, 1,000 GPUs and 50 models within 10 s
	$(BIN)/python benchmarks/plan_search.py

bench-simulate: install  ## plan --simulate beside engines and a router that run here: within 15 % (about 2 minutes)
	$(BIN)/python benchmarks/plan_simulate.py $(BENCH)

lock: install  ## rewrite the hashed lock files
	scripts/lock

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
