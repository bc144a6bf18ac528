# make lab: install and open a copy of the course.   make test: install if needed and test it.   make help: the rest.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Each process would compile all that it imports (torch: 4 s in place of 2), and the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
WORKERS ?= 2
# A notebook waits a third of its time: three at once on two cores.
NBVAL_WORKERS ?= $(shell echo $$((3 * $(WORKERS) / 2)))
# Another torch than the pinned one, in an environment of its own: make quick TORCH=2.11.0 VENV=.venv-torch-2.11.0
PINNED_TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED_TORCH)
SUPPORTED := import sys, venv, ensurepip; sys.exit(not sys.version_info >= (3, 11))
PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
            $$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; break; }; done)
# VENV= (empty) runs a target with PYTHON itself and installs nothing.
ifeq ($(strip $(VENV)),)
  RUN := $(PYTHON)
  STAMP :=
  LAB_STAMP :=
else
  RUN := $(VENV)/bin/python
  STAMP := $(VENV)/.installed
  LAB_STAMP := $(VENV)/.installed-lab
endif
# make lab CPU=1: PyTorch without CUDA, 0.2 GB in place of some 5 GB on Linux.
CPU ?=
FROM := $(if $(CPU),--extra-index-url https://download.pytorch.org/whl/cpu)
PIP := $(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(VENV)/constraints.txt $(FROM)
ROOT_FLAG := $(if $(filter 0,$(shell id -u)),--allow-root)
LAB_FLAGS ?=
# JupyterLab writes into what it opens; the clone's own notebooks stay as git has them.
LAB_FOLDER ?= runs/course
BENCH_FLAGS ?=
# Which tabs and side bars JupyterLab shows here; at first the left side bar is closed, so that no line of code is cut.
LAB_PAGE := $(abspath $(or $(strip $(VENV)),.venv)/lab-page)
# The first of these Pythons that is here, by its name or as pyenv keeps it; empty if none is.
found = $(shell for v in $(1); do for p in python$$v $$HOME/.pyenv/versions/$$v.*/bin/python; do \
            $$p -c '$(SUPPORTED)' >/dev/null 2>&1 && { echo $$p; exit; }; done; done)
FIRST := notebooks/index.ipynb
# of npm: CPython as WebAssembly, a checker of pages, formulas, slides and their formulas, JupyterHub's proxy
PYODIDE := 314.0.7
AXE := 4.14.1
MATHJAX := 3.2.2
REVEAL := 6.0.2
KATEX := 0.19.1
PROXY := 5.3.0
NOTEBOOKS := $(wildcard notebooks/*.ipynb solutions/*.ipynb)
LESSONS := $(filter-out %_in_depth.ipynb,$(wildcard notebooks/*.ipynb))
UNIT := -p no:nbval --no-loadscope-reorder --ignore=tests/gpu --ignore=tests/places --ignore=tests/browser --ignore=tests/slurm --ignore=tests/test_grading.py --ignore=tests/native/test_deepspeed.py --ignore=tests/fake_gpu --ignore=tests/faults
# Stored outputs hang on no processor: kernels of PyTorch, oneDNN and MKL without AVX-512, then without AVX2.
KERNELS := avx2 default
NBVAL_THREADS ?= 1
NBVAL := -p tests.kernel_starts --nbval --nbval-current-env --nbval-cell-timeout=900 -p no:cacheprovider -n $(NBVAL_WORKERS) --dist loadfile

.PHONY: help setup lab page site slides wheel cheat-sheet test quick lint unit nbval demo bench doctor fmt notebooks exercises mirrors quotes korean korean-status check address \
        edit size rest nightly setup-newer quick-newer test-in-depth test-exhaustive test-programs test-faults test-colab test-newest test-jupyterhub test-gpu gpu-day gpu-day-wheels test-fake-gpu test-browser test-grading test-deepspeed test-slurm test-kernels test-processors clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## make .venv and install the course and its tools into it; a second call does nothing

$(VENV)/constraints.txt: constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "make: no Python 3.11 or newer with venv found; install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "make: PYTHON=$(PYTHON) is not a Python 3.11 or newer with venv and ensurepip" >&2; exit 1; }
	@test -x $(VENV)/bin/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

$(VENV)/.installed: pyproject.toml $(VENV)/constraints.txt
	@echo "installing the course and what its tests need into $(VENV) (some minutes the first time)"
	@$(PIP) -e ".[lab,test]"
	@touch $@ $(LAB_STAMP)

$(VENV)/.installed-lab: pyproject.toml $(VENV)/constraints.txt
	@echo "installing the course into $(VENV) (some minutes the first time)"
	@$(PIP) -e ".[lab]"
	@touch $@

lab: $(LAB_STAMP)  ## open your copy of the course in JupyterLab, on this machine only; CPU=1 for a machine without a GPU
	@$(RUN) -m course_lib new '$(LAB_FOLDER)' --with-solutions
	@test -d '$(LAB_PAGE)' || { mkdir -p '$(LAB_PAGE)' && cp course_lib/templates/*.jupyterlab-workspace '$(LAB_PAGE)'; }
	JUPYTERLAB_WORKSPACES_DIR='$(LAB_PAGE)' $(RUN) -m jupyterlab --ip=127.0.0.1 --KernelManager.transport_encryption=auto $(ROOT_FLAG) --ServerApp.root_dir="$$(cd '$(LAB_FOLDER)' && pwd)" --LabApp.default_url=/lab/tree/$(FIRST) $(LAB_FLAGS)

test: setup  ## lint, the tests that find bugs of the core, every lesson under strict nbval
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory nbval NOTEBOOKS="$(LESSONS)"

test-in-depth: setup  ## the other notebooks, in depth and solutions, under strict nbval
	@$(MAKE) --no-print-directory nbval NOTEBOOKS="$(filter-out $(LESSONS),$(NOTEBOOKS))"

quick: setup  ## the tests that start no process and take less than a second each; under a minute
	$(RUN) -m pytest -m "not launches and not slow and not exhaustive" -n $(WORKERS) --dist loadfile $(UNIT)

quick-newer:  ## the same on Python 3.13, in .venv-3.13; says so where there is none
	@if [ -z "$(call found,3.13)" ]; then echo "make: skipped, no Python 3.13 with venv here"; \
	else $(MAKE) --no-print-directory quick $(NEWER); fi

setup-newer quick-newer: NEWER = PYTHON="$(call found,3.13)" VENV=.venv-3.13
setup-newer:  ## the environment of quick-newer
	@if [ -n "$(call found,3.13)" ]; then $(MAKE) --no-print-directory setup $(NEWER); fi

lint: setup  ## ruff, for the package, the tests and the notebooks
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

unit: setup  ## quick, and the suites of the core that start ranks (CORE in tests/conftest.py)
	$(RUN) -m pytest -m "(core or not launches and not slow) and not long and not programs and not exhaustive" -n $(WORKERS) --dist loadfile $(UNIT)

rest: setup  ## the tests that make test leaves out
	$(RUN) -m pytest -m "(long or not core and (launches or slow)) and not programs and not exhaustive" -n $(WORKERS) --dist loadfile $(UNIT)

test-programs: setup  ## ranks and the trainer under torchrun, accelerate, pods, scripts; an installed wheel; thirty kernels at once
	$(RUN) -m pytest -m "programs and not exhaustive" -n $(WORKERS) --dist loadfile $(UNIT)

test-faults: setup  ## ranks of every parallelism killed, stopped, hung, raising, disagreeing: one error, nothing left
	$(RUN) -m pytest -p no:nbval -p no:cacheprovider -n $(WORKERS) --dist loadgroup tests/faults

test-exhaustive: setup  ## the cases of which the other tests are a sample: worlds, layouts, checkpoints, simulated ranks
	$(RUN) -m pytest -m exhaustive -n $(WORKERS) --dist worksteal $(UNIT)

nbval: setup  ## every notebook and solution runs, and prints what it stores
	@if [ -n "$(NOTEBOOKS)" ]; then env -u MPLBACKEND OMP_NUM_THREADS=$(NBVAL_THREADS) $(RUN) -m pytest $(NBVAL) $(NOTEBOOKS); else echo "no notebooks yet"; fi

# Threads of a team wait by spinning: with two, several notebooks at once starve each other, and cells take minutes.
test-processors: setup  ## every lesson as on other processors, with one thread and with two
	@for threads in 1 2; do \
	  if [ $$threads = 1 ]; then workers=$(NBVAL_WORKERS); else workers=1; fi; \
	  lessons="nbval NBVAL_THREADS=$$threads NBVAL_WORKERS=$$workers"; \
	  $(MAKE) --no-print-directory $$lessons NOTEBOOKS="$(LESSONS)"; \
	  for kernels in $(KERNELS); do \
	    echo "the lessons with $$kernels kernels and $$threads threads"; \
	    ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=$$kernels \
	      $(MAKE) --no-print-directory $$lessons NOTEBOOKS="$(LESSONS)"; \
	  done; \
	done

demo: $(LAB_STAMP)  ## one table: the same tiny Llama trained by 1, 2 and 4 ranks
	$(RUN) -m course_lib demo

bench: setup  ## the course's own implementations against PyTorch's, in one run
	$(RUN) -m course_lib bench $(BENCH_FLAGS)

doctor: $(LAB_STAMP)  ## what this machine can run, chapter by chapter
	$(RUN) -m course_lib doctor

fmt: setup  ## notebooks in their normal form; ruff format and fixes
	$(RUN) -m course_lib.authoring fmt
	$(RUN) -m ruff check --fix --quiet . || true
	$(RUN) -m ruff format .

notebooks: setup  ## run every notebook and solution and store its outputs; then mirrors, exercises and form
	@for path in $(NOTEBOOKS); do $(RUN) -m course_lib run $$path --save || exit 1; done
	$(RUN) -m course_lib.authoring fmt

mirrors: setup  ## rewrite the cells that mirror the package
	$(RUN) -m course_lib.authoring mirrors

exercises: setup  ## write exercises/ from solutions/
	$(RUN) -m course_lib.authoring exercises

quotes: setup  ## record which numbers of the prose stand in an output above; make check compares them
	$(RUN) -m course_lib.authoring quotes

korean: setup  ## write ko/ from the English notebooks and their catalogues in ko/locale; make fmt does it too
	$(RUN) -m course_lib.authoring korean

korean-status: setup  ## which cells have no Korean text, or one of other words; those stand in English
	@$(RUN) -m course_lib.authoring korean-status

check: setup  ## what the notebooks lack, without running them
	$(RUN) -m course_lib.authoring check

address: setup  ## where the course is had from: make address REPOSITORY=https://github.com/owner/name; badges, install cells, HUB=https://a.jupyterhub
	$(RUN) -m course_lib.authoring address "$(REPOSITORY)" $(if $(HUB),--hub "$(HUB)")

NPM := build/npm/node_modules
$(NPM)/%/package.json:
	@command -v npm >/dev/null || { echo "make: npm not found; install Node.js 18 or newer: it brings Pyodide, MathJax and reveal.js" >&2; exit 1; }
	npm install --silent --no-audit --no-fund --ignore-scripts --no-save --prefix build/npm pyodide@$(PYODIDE) axe-core@$(AXE) mathjax@$(MATHJAX) reveal.js@$(REVEAL) katex@$(KATEX) configurable-http-proxy@$(PROXY)

page: setup $(NPM)/pyodide/package.json  ## build/page: panels, planner and claims that compute in a browser; needs npm
	$(RUN) -m course_lib.web.page build/page --pyodide $(NPM)/pyodide

slides: setup $(NPM)/reveal.js/package.json $(NPM)/katex/package.json  ## build/slides: a deck for each lesson, to show in class; needs npm
	$(RUN) -m course_lib.authoring.slides build/slides --npm $(NPM)

site: setup build/npm/node_modules/mathjax/package.json  ## build/site: lessons, exercises and reference as pages that need no server; with build/page where that is built
	@$(RUN) -c 'import furo, myst_nb' 2>/dev/null || $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[lab,test,site]"
	rm -rf build/site
	@SECONDS=0; set -e; for at in en:.: ko:ko:/ko; do IFS=: read -r lang from to <<<"$$at"; \
	  COURSE_LANG=$$lang $(RUN) -m sphinx -q -E -W --keep-going -c docs/site -d build/site-doctrees$$to $$from build/site$$to; done; \
	echo "build/site: $$(du -sm build/site | cut -f 1) MB in two languages, built in $$SECONDS s"

wheel: setup  ## build/wheel: the whole wheel; build/colab: the one to upload, without notebooks and weights
	rm -rf build/lib build/wheel build/colab
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(RUN) -m course_lib.authoring.wheel build/wheel/course_lib-*.whl build/colab

cheat-sheet: setup  ## docs/cheat_sheet.svg and .pdf: one page of bytes, FLOPs, messages, bubbles, scales
	$(RUN) -m course_lib.plots.cheat_sheet docs

test-gpu: $(STAMP)  ## what needs a GPU; each test says why it is skipped without one
	$(RUN) -m pytest -rs -p no:cacheprovider tests/gpu

# What a Python with torch and pytest, but without this course's other packages, lacks for `make gpu-day`.
GPU_WHEELS ?= .gpu-wheels
GPU_PYTHON ?= 3.12
GPU_PACKAGES := docstring_parser tyro typeguard
GPU_DAY ?= runs/gpu-day.json

gpu-day-wheels: setup  ## wheels that a plain python3 lacks for gpu-day, on a machine without network: GPU_PYTHON=3.12
	rm -rf $(GPU_WHEELS)
	$(RUN) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 -c constraints.txt -d $(GPU_WHEELS) $(GPU_PACKAGES)
	@kib=$$(du -sk $(GPU_WHEELS) | cut -f 1); echo "$(GPU_WHEELS): $$kib KiB"; test $$kib -le 61440

gpu-day: $(STAMP)  ## what needs a GPU, most important first, in at most 9 minutes on one; a plain python3 with the wheels: VENV= PYTHON=python3
	$(RUN) benchmarks/gpu_day.py --out $(GPU_DAY) $(if $(strip $(VENV)),,$(if $(wildcard $(GPU_WHEELS)/*.whl),--wheels $(GPU_WHEELS)))

test-fake-gpu: setup  ## engines, what chapters 00 and 03 to 11 launch, kernels and FP8, on fake CUDA tensors: a wrong device raises
	$(RUN) -m pytest -rs -p no:cacheprovider -n $(WORKERS) --dist loadfile tests/fake_gpu

test-browser: page site slides  ## JupyterLab, the page and the site in headless Chromium: chapters run, sliders move, narrow and wide, light and dark
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || { echo "make: no chromium here; install it (Debian, Ubuntu: apt-get install chromium) and call make test-browser again" >&2; exit 1; }
	@$(RUN) -c 'import playwright' 2>/dev/null || $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[lab,test,browser]"
	$(RUN) -m pytest -rs tests/browser

test-colab: setup  ## the built wheel with Colab's versions: it replaces none, chapters run; 5 GB of an environment
	COLAB_PYTHON="$(call found,3.12 3.13)" $(RUN) -m pytest -rs --durations=0 --durations-min=10 -p no:cacheprovider tests/places/test_colab.py

test-newest: setup  ## the built wheel with the newest of every package; 5 GB of an environment
	$(RUN) -m pytest -rs --durations=0 --durations-min=10 -p no:cacheprovider tests/places/test_newest.py

test-jupyterhub: setup $(NPM)/configurable-http-proxy/package.json  ## a real JupyterHub: two users, one read-only installation, launches that take turns; needs npm
	$(RUN) -m pytest -rs -p no:cacheprovider tests/places/test_jupyterhub.py

test-grading: setup  ## nbgrader and course grade on all chapters: right, untouched, cheating
	@$(RUN) -c 'import nbgrader' 2>/dev/null || $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[lab,test,grading]"
	$(RUN) -m pytest -rs tests/test_grading.py

test-deepspeed: setup  ## ZeRO by DeepSpeed, stages 1 to 3, against one process
	@$(RUN) -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("deepspeed"))' || $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[lab,test,deepspeed]"
	$(RUN) -m pytest -rs tests/native/test_deepspeed.py tests/plan/test_plan_export.py

test-slurm: setup  ## launches and the trainer on a real Slurm of two virtual nodes (Debian or Ubuntu, as root)
	@$(RUN) -c 'import submitit' 2>/dev/null || $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[lab,test,slurm]"
	$(RUN) tests/slurm/cluster.py -- $(RUN) -m pytest -rs -p no:cacheprovider tests/slurm

test-kernels: setup  ## kernels in Triton's interpreter, and compiled for an H100 without one; Triton takes 1 GB
	@$(RUN) -c 'import triton' 2>/dev/null || $(RUN) -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[lab,test,kernels]"
	COURSE_KERNELS=interpreter $(RUN) -m pytest -rs -p no:nbval -p no:cacheprovider tests/kernels
	COURSE_KERNELS=interpreter TRITON_INTERPRET=1 $(RUN) -m pytest $(NBVAL) notebooks/13a_inside_a_gpu.ipynb
	COURSE_KERNELS=gpu $(RUN) -m pytest -rs -p no:nbval -p no:cacheprovider tests/kernels/test_compiled.py

nightly: setup  ## what takes long or installs other programs, where files that it touches have changed; results in docs/NIGHTLY.md
	$(RUN) tests/nightly.py

size: setup  ## count the lines of each folder into docs/SIZE.md, which a test holds them to
	$(RUN) tests/size.py

edit: setup  ## CHAPTER=05: mirrors, exercises, form, lint, and this chapter's lessons, solutions and graders
	@test -n "$(wildcard notebooks/$(CHAPTER)*.ipynb)" || { echo "make: no chapter '$(CHAPTER)'; try make edit CHAPTER=05" >&2; exit 1; }
	@$(MAKE) --no-print-directory mirrors exercises fmt lint check
	@$(MAKE) --no-print-directory nbval NOTEBOOKS="$(filter $(foreach folder,notebooks solutions,$(folder)/$(CHAPTER)%),$(filter-out %_in_depth.ipynb,$(NOTEBOOKS)))"
	$(RUN) -m pytest -p no:nbval tests/test_notebooks.py tests/checks -k "notebooks or ch$(CHAPTER)" -m "not exhaustive" -n $(WORKERS)

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
