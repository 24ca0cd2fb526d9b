# `make lab` is all a learner needs; `make` lists the rest. Everything is installed into .venv, from requirements.txt.
.DEFAULT_GOAL := help
.PHONY: help lab test course notebooks release pins clean

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
export TORCH_INDEX
PY := .venv/bin/python
# There once the install is complete; its name changes with the pins and with the place of the clone.
READY := .venv/ready-$(shell (cat requirements.txt; pwd) | cksum | cut -d ' ' -f 1)

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-10s %s\n", $$1, $$2}'

lab: $(READY) ## install what is missing, then open JupyterLab on the start page; LAB="--no-browser" passes options on
	.venv/bin/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start.ipynb $(LAB)

test: $(READY) ## the same set-up, then every test, and every lesson's stored output against a fresh one
	$(PY) -m pytest -n 2 --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout 60 tests notebooks

course: $(READY) ## run every lesson headless and print a table; the stored outputs stay as they are
	$(PY) -m tpcourse.course run

notebooks: $(READY) ## for authors: run the lessons (or ONLY="notebooks/02_*.ipynb"), store their outputs, rewrite the start page
	$(PY) -m tpcourse.course store $(ONLY)

release: $(READY) ## for instructors: the learners' archive, without solutions and hidden tests
	$(PY) -m tpcourse.grade.release

pins: ## for maintainers: write requirements.txt anew from pyproject.toml's ranges
	$(PYTHON) tpcourse/course/install.py pins

clean: ## remove .venv and all that was built
	rm -rf .venv build dist .pytest_cache *.egg-info

$(READY):
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 or newer was found. Install Python 3.11, or name one: make lab PYTHON=/path/to/python3.11'; exit 1; }
	@$(PYTHON) tpcourse/course/install.py venv && touch $@
