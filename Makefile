# `make help` explains each target.
PY := .venv/bin/python
PYTEST_ARGS ?=
PETASTORM_TESTS = $(wildcard tests/test_petastorm*.py tests/ingest/test*petastorm*.py) tests/ingest/test_source.py
# Tests of pages, of how the sources are laid out, and of benchmarks.
HOUSE = $(wildcard tests/test_architecture.py tests/test_bed.py tests/test_benchmarks_*.py tests/test_errors.py \
	tests/test_faults_page.py tests/test_plain.py tests/test_site.py tests/benchmarks tests/*/test_benchmarks.py \
	tests/dlrm/test_gpu_benchmark.py tests/dlrm/test_launch_page.py tests/etl/test_features_doc.py)
WITHOUT_HOUSE = $(addprefix --ignore=,$(HOUSE))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-petastorm test-adapters check docs bench bench-peers race dist clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' Makefile

setup:  ## make .venv from the locks and check Java (instant when nothing changed)
	@bash .ci/setup

demo: setup  ## data, Spark ETL, 2-rank training with tuned ingestion; ends on a report to open
	@$(PY) -m examples.demo --out demo-out

.PHONY: demo-cluster
demo-cluster: setup  ## the same on a Spark cluster of a master and two workers, and with two torchrun agents, all of them here
	@$(PY) -m examples.demo --out demo-out --cluster

.PHONY: demo-schema
demo-schema: setup  ## a table gets new columns while 2 ranks train: with the agent, and frozen at the change, on one page
	@$(PY) -m examples.demo.schema_change --out demo-schema-out

# Many tests wait for what they started, so fewer processes would leave the two cores idle. tests/conftest.py says which
# files a process takes. They start many programs, which share what one of them has compiled. A process that ends is
# named and ends the run, since xdist does not end one whose last test took its process down.
test: export PYTHONDONTWRITEBYTECODE =
test: setup  ## the tests of the product, in four processes that share one queue; those of PYTEST_ARGS in one process
	@$(PY) -m pytest $(or $(PYTEST_ARGS),-n 4 --max-worker-restart=0 $(WITHOUT_HOUSE))

.PHONY: quick
quick: setup  ## the tests that need neither Spark nor torchrun, two to three minutes: for the time between two edits
	@$(PY) -m pytest -n 2 --max-worker-restart=0 -m "not spark and not slow" $(WITHOUT_HOUSE) $(PYTEST_ARGS)

test-petastorm: setup  ## the tests of Petastorm's part on Petastorm 0.12
	@bash .ci/peers petastorm-0.12
	@.venv-peers-petastorm-0.12/bin/python -m pytest $(PETASTORM_TESTS)

test-adapters: setup  ## examples/ that feed FuxiCTR and Lightning, on the real packages, in environments of their own
	@bash .ci/peers fuxictr lightning
	@$(PY) -m pytest tests/e2e/test_adapters.py $(PYTEST_ARGS)

.PHONY: test-ray
test-ray: setup  ## workers that a real Ray cluster of two nodes places, in a network of its own that has only 127.0.0.1
	@bash .ci/peers ray-workers
	@unshare --user --map-root-user --net sh -c \
		'ip link set lo up && exec .venv-peers-ray-workers/bin/python -m tests.ingest.remote.ray_cluster'

.PHONY: test-gpu
test-gpu: setup  ## what needs an NVIDIA GPU: its tests, and benchmarks/gpu.py on all GPUs of this host (without one: exit code 2)
	@$(PY) -m benchmarks.gpu --short
	@$(PY) -m pytest -m gpu $(PYTEST_ARGS)

.PHONY: storm
storm: setup  ## the loader under schedules and faults drawn from seeds, held against its one-thread twin (SEEDS=1000, SEED=7)
	@$(PY) -m tests.storm $(if $(TABLES),--tables) $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0))

.PHONY: fuzz
fuzz: setup  ## specs and rows drawn from seeds, by Spark, local engine, loader and server (SECONDS=600, FIRST=5, SEED=7, ONLY=four_ways)
	@$(PY) -m tests.fuzz $(if $(ONLY),--only $(ONLY)) $(if $(FIRST),--first $(FIRST)) $(if $(SEED),--seed $(SEED),--seconds $(or $(SECONDS),600))

check: setup  ## style, types, that no text or function became harder to read, and tests of pages, layout and benchmarks
	@.venv/bin/ruff format --check --quiet . || { echo "make check: run .venv/bin/ruff format" >&2; exit 1; }
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@$(PY) .ci/plain.py
	@$(PY) -m pytest -q --durations=0 --durations-min=2 $(HOUSE)

docs: .venv-docs/made  ## the documentation as a site, build/docs/index.html; dead links and foreign scripts are errors
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs --quiet build --clean
	@.venv-docs/bin/python docs/site/built.py build/docs
	@echo build/docs/index.html

.venv-docs/made: requirements-docs.lock | setup
	@rm -rf .venv-docs && $(PY) -m venv .venv-docs
	@.venv-docs/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r $<
	@touch $@

bench: setup  ## the loader beside the decoder's limit and a loop of the least work
	@$(PY) -m benchmarks.loaders

bench-peers: setup  ## environments for tf.data, Ray Data, Petastorm, Hugging Face datasets, streaming, SPDL, LanceDB, litData and Grain
	@bash .ci/peers

race: setup  ## loaders side by side on one table, drawn as they run: a minute, no Java, no Spark (FULL=1: all peers)
	@$(PY) -m benchmarks.race $(if $(FULL),--full)

.PHONY: tuned-race
tuned-race: setup  ## loaders where there is something to tune, in short turns (LANES=python,far; FULL=1: three rounds, hours)
	@$(PY) -m benchmarks.tuned_race $(if $(FULL),,--short) $(if $(LANES),--lanes $(LANES)) --output build/tuned-race.json

.PHONY: bench-peers-etl
bench-peers-etl: setup  ## environment for benchmarks.etl_peers: pandas, Polars, DuckDB
	@test -x .venv-peers-etl/bin/python || $(PY) -m venv .venv-peers-etl
	@.venv-peers-etl/bin/python -m pip install -q -r requirements-peers-etl.txt

.PHONY: wheel
wheel: .venv-build/made  ## dist/: the wheel, and the source archive that it is built from; checked as a package index does
	@rm -rf dist build/lib
	@.venv-build/bin/python -m build --no-isolation -o dist . >/dev/null
	@.venv-build/bin/twine check --strict dist/*

.PHONY: test-install
test-install: wheel  ## pip and uv each install that wheel in an empty environment, where it is used (PYTHON=…): 3 GB each with CUDA
	@bash .ci/install-wheel

.venv-build/made: requirements-build.lock | setup
	@rm -rf .venv-build && $(PY) -m venv .venv-build
	@.venv-build/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r $<
	@touch $@

dist:  ## build/sluice.zip, for spark-submit --py-files
	@python3 .ci/dist.py build/sluice.zip

clean:  ## remove what was built and the demo's output, not .venv
	@rm -rf build dist demo-out demo-schema-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse
