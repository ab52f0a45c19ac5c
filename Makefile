# Two commands do everything on a fresh Debian or Ubuntu machine with Python 3, its venv module and make:
#
#   make demo    install into .venv, then train a tiny model on real text with two CPU workers
#   make test    install into .venv, then run all tests
#
# Without a GPU, PyTorch's CPU builds are a much smaller download: point pip at them, and name the build
# with TORCH=torch==2.13.0+cpu.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

.PHONY: demo test lint format sshd clean

demo: $(VENV)/train.stamp
	$(BIN)/gpuctl launch -f cluster.example.yaml --strategy zero2

test: $(VENV)/dev.stamp
	@scripts/sshd >/dev/null || true
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sshd:
	@scripts/sshd

clean:
	rm -rf $(VENV) .cache

# A stamp is newer than what it was made from: changing pyproject.toml installs again.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/train.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[train]"
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[train,dev]"
	@touch $@ $(VENV)/train.stamp
