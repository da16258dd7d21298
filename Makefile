# One script each. `make run` and `make test` need python3 (3.11 or later, with venv) and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-input
PYTEST := $(BIN)/python -m pytest
# The integration tests mostly wait: two run at a time, with servers of their own, unless they share servers named by URL.
# Those that measure run alone, afterwards.
PARALLEL := $(if $(filter url,$(TEST_SERVICES))$(REDIS_URL)$(RABBITMQ_URL),,-n 2 --dist loadfile)

.PHONY: run test unit integration check lint format bench clean
.DEFAULT_GOAL := run

run: $(VENV)/run.stamp
	@echo "Starting inference-worker dev; stop it with Ctrl-C"
	@exec $(BIN)/inference-worker dev

test: unit integration

unit: $(VENV)/test.stamp
	@echo "Unit tests"
	@$(PYTEST) tests/unit

integration: $(VENV)/test.stamp
	@echo "Integration tests"
	@$(PYTEST) tests/integration -m "not alone" $(PARALLEL)
	@$(PYTEST) tests/integration -m alone

check: lint unit

lint: $(VENV)/test.stamp
	@echo "Format, lint, types"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/test.stamp
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/test.stamp
	@$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage htmlcov .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "inference-worker needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not to be found)." >&2; \
		echo "Name another one: make PYTHON=python3.13 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/run.stamp: requirements.txt pyproject.toml | $(VENV)/made.stamp
	@echo "Installing what the worker needs (once)"
	@$(PIP) --require-hashes -r requirements.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/test.stamp: requirements-test.txt $(VENV)/run.stamp
	@echo "Installing what the tests need (once)"
	@$(PIP) --require-hashes -r requirements-test.txt
	@touch $@
