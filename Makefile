# Everything runs from .venv, which `make` creates; nothing else needs to be set up.
PYTHON ?= python3
BIN := .venv/bin
export GRADVEIL_OFFLINE ?= 1

.PHONY: demo test quick check bench clean

demo: .venv/installed  ## train a federated model on real digits and print the path of its page
	@rm -rf runs/demo
	$(BIN)/gradveil train --dataset mnist-5k --model lenet5 --clients 10 --rounds 20 --sensitive 0.1 --out runs/demo
	@echo "Look at it: $(CURDIR)/runs/demo/report.html"

test: check  ## everything that CI checks
	$(BIN)/python -m pytest --doctest-modules src tests

quick: check  ## the same without the slow tests
	$(BIN)/python -m pytest --doctest-modules src tests -m "not slow"

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv-bench/installed  ## speed against a plain loop, Flower's simulation and breaching's attack, in one run each
	.venv-bench/bin/python benchmarks/simulation.py
	.venv-bench/bin/python benchmarks/attacks.py --grow

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv-bench/installed: pyproject.toml constraints.txt  # apart: Flower pins much
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

clean:
	rm -rf .venv .venv-bench runs build dist src/*.egg-info
