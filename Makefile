# Everything runs from .venv, which `make` creates; nothing else needs to be set up.
PYTHON ?= python3
BIN := .venv/bin
# one test process per core, one thread per process
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --doctest-modules src tests
export GRADVEIL_OFFLINE ?= 1

.PHONY: demo test quick check docs results bench clean

demo: .venv/installed  ## audit six defences on real digits, and print the paths of two pages
	@rm -rf runs/demo runs/demo-veil
	$(BIN)/gradveil audit --dataset mnist-5k --model lenet-dlg --targets 8 --tap 1/500 --adaptive --sensitive none \
	  --effort quick --yes --out runs/demo --defences soteria:probes=32,entangle,dcs2,fedkl,dp-sgd
	$(BIN)/gradveil audit --dataset mnist-5k --model patches --targets 4 --tap 1 --rounds 60 --adaptive \
	  --effort quick --yes --out runs/demo-veil --defences veil:mu=2
	@echo "Two pages: $(CURDIR)/runs/demo/report.html and $(CURDIR)/runs/demo-veil/report.html"

test: check  ## everything that CI checks
	$(PYTEST)

quick: check  ## the same without the slow tests
	$(PYTEST) -m "not slow"

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

results: .venv/installed  ## write docs/results/ and docs/leaderboard.md from results/
	$(BIN)/python -m gradveil.reproduce.pages
	$(BIN)/python -m gradveil.reproduce.leaderboard
	$(BIN)/python benchmarks/pages.py

docs: .venv/installed  ## the documentation as a site that works offline, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Look at it: $(CURDIR)/build/site/index.html"

bench: .venv-bench/installed  ## speed compared with a plain loop, Flower and breaching, and of Soteria and DCS2 compared with one image at a time, and of list and describe
	.venv-bench/bin/python benchmarks/simulation.py
	.venv-bench/bin/python benchmarks/attacks.py --grow
	.venv-bench/bin/python benchmarks/soteria.py
	.venv-bench/bin/python benchmarks/dcs2.py
	.venv-bench/bin/python benchmarks/front_door.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

.venv-bench/installed: pyproject.toml constraints.txt  # its own environment: Flower and breaching pin many versions
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

clean:
	rm -rf .venv .venv-bench runs build dist src/*.egg-info
