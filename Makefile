# Every target sets itself up: a virtual environment in .venv with the tested versions. Needs Python 3.11 or later.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/tpverify generate --compare --tp 8

test: $(READY)
	$(BIN)/pytest -q -m "not gpu and not multi_gpu"

lint: $(READY)
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/tpverify bench

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt $(shell find csrc -type f)
	@echo 'Setting up .venv with the tested versions: a few minutes, once'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@
