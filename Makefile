# demo, test, check, generate, bench: the five words a contributor needs.
.DEFAULT_GOAL := help
PATH := $(CURDIR)/.venv/bin:$(HOME)/.cache/opd/uv/bin:$(PATH)
export PATH
RUN_TESTS := .venv/bin/python tools/dev/run_tests.py

.PHONY: help demo demo-down run-local test test-all test-unit check generate bench bench-core bench-operator chaos matrix env-operator env-trainer

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "%-16s %s\n", $$1, $$2}'

env-operator: ## make .venv: operator, command line, cluster
	@tools/dev/setup_env.sh operator

env-trainer: ## make .venv-trainer: trainer, opd run, opd report
	@tools/dev/setup_env.sh trainer

demo: env-operator env-trainer ## run examples/quickstart.yaml on a real cluster (CONTEXT=name uses yours) and show the result
	.venv/bin/python tools/dev/demo.py $(if $(CONTEXT),--context $(CONTEXT))

demo-down: env-operator ## remove the cluster that make demo left running
	.venv/bin/opd-cluster down

run-local: env-operator env-trainer ## the same job without a cluster and without root, as processes of this machine
	.venv-trainer/bin/python examples/quickstart/prepare.py opd-data
	.venv-trainer/bin/opd run examples/quickstart.yaml --data opd-data

test: env-operator env-trainer ## the landing set: unit, integration, e2e smoke
	$(RUN_TESTS) landing

test-all: env-operator env-trainer ## everything, also what is too long for landing
	$(RUN_TESTS) all

test-unit: env-operator env-trainer ## the unit tier, in seconds
	$(RUN_TESTS) unit

check: env-operator env-trainer ## format, lint, types, import contracts, generated files
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy crds/opd_api operator/opd_operator tools/cli/opd_cli tools/cluster/opd_cluster
	.venv-trainer/bin/mypy trainer_image/opd_trainer/core
	.venv-trainer/bin/lint-imports
	.venv/bin/python -m opd_api.generate --check
	.venv/bin/python tools/chart/values.py --check
	.venv/bin/python tools/docs/failures.py --check
	.venv/bin/python tools/docs/matrix.py --check
	.venv/bin/python tools/dev/file_lengths.py

generate: env-operator ## CRD, chart copy, documentation pages from the models
	.venv/bin/python -m opd_api.generate
	.venv/bin/python tools/chart/values.py
	.venv/bin/python tools/docs/matrix.py --page
	.venv/bin/python tools/docs/failures.py

bench: bench-core bench-learning bench-operator ## every benchmark with its bars

bench-core: env-operator env-trainer ## the OPD core against its published peers
	.venv-trainer/bin/python tests/bench/core/run.py

bench-learning: env-operator env-trainer ## what the signals learn, and how fast beside TRL: writes docs/experiments.md
	.venv-trainer/bin/python tests/bench/learning/signals.py
	.venv-trainer/bin/python tests/bench/learning/against_trl.py

bench-operator: env-operator ## the operator on a real API server
	.venv/bin/python tests/bench/operator/run.py

chaos: env-operator ## 2,000 random schedules on a real API server; SEED=n plays the round of that seed again
	.venv/bin/python tests/chaos/run.py $(if $(SEED),--seed $(SEED)) $(if $(SCHEDULES),--schedules $(SCHEDULES)) $(if $(LIVES),--lives $(LIVES))

matrix: env-operator env-trainer ## every failure on a real cluster or API server: writes docs/failure-matrix.md
	.venv/bin/python tools/docs/matrix.py; seen=$$?; .venv/bin/python tools/docs/failures.py; exit $$seen
