"""The pins and everything that must agree with them, and the installation, with stand-ins for what would take minutes."""

import ast
import io
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tpcourse.course import install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
PINS = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in PINNED}


def test_every_pin_is_exact_and_leaves_the_build_of_torch_open():
    assert len(PINS) == len(PINNED)
    for pin in PINNED:
        assert re.fullmatch(r"==[0-9][\w.]*", str(pin.specifier)), f"{pin} is not one exact version without a local part"
        assert not re.match(install.CUDA, pin.name), f"{pin} belongs to a CUDA build of torch, which brings it itself"


@pytest.mark.parametrize("wanted", PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])
def test_the_pins_lie_in_the_ranges_of_pyproject(wanted):
    wanted = Requirement(wanted)
    assert str(wanted.specifier), f"{wanted.name} has no range"
    assert wanted.specifier.contains(PINS[canonicalize_name(wanted.name)])


def test_conda_installs_the_same_pins_with_a_python_that_pyproject_takes():
    lines = [line.strip() for line in (ROOT / "environment.yml").read_text().splitlines()]
    (python,) = [line.removeprefix("- python=") for line in lines if line.startswith("- python=")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    assert lines[lines.index("- pip:") + 1:] == ["- -r requirements.txt", "- -e ."]


def test_the_environment_that_runs_the_tests_is_the_pinned_one():
    if not any((ROOT / ".venv").glob("ready-*")) or Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("these tests do not run in .venv")
    frozen = subprocess.run([sys.executable, "-m", "pip", "freeze", "--all"], capture_output=True, text=True, check=True)
    found = dict(line.split("==") for line in frozen.stdout.splitlines() if "==" in line)
    found = {canonicalize_name(name): version.split("+")[0] for name, version in found.items()}
    assert {name: found.get(name) for name in PINS if name != "appnope"} == {n: v for n, v in PINS.items() if n != "appnope"}


def test_whatever_the_package_and_its_tests_import_is_declared():
    packages = packages_distributions()
    for folder, groups in [("tpcourse", []), ("tests", ["test"])]:
        wanted = PROJECT["dependencies"] + [w for group in groups for w in PROJECT["optional-dependencies"][group]]
        declared = {canonicalize_name(Requirement(line).name) for line in wanted}
        names = set().union(*map(imported, (ROOT / folder).rglob("*.py")))
        for name in names & packages.keys() - {"tpcourse"}:
            given_by = {canonicalize_name(package) for package in packages[name]}
            assert given_by & declared, f"{folder} imports {name}, and pyproject.toml does not say so"


def imported(path: Path) -> set[str]:
    """The first part of every module name that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.split(".")[0] for name in names}


# make: when it installs, and when it does not


@pytest.fixture
def clone(tmp_path):
    """A clone with the real Makefile and pins, in which "python" only notes that it was asked to install."""
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text('#!/bin/sh\nmkdir -p .venv\necho "$@" >> installed\ntest ! -e broken\n')
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`make` of the target that stands for a complete .venv."""
    names = subprocess.run(["make", "-pn"], cwd=clone, capture_output=True, text=True).stdout
    ready = re.search(r"^(\.venv/ready-\d+):", names, re.M).group(1)
    return subprocess.run(["make", ready, *(arguments or ["PYTHON=./python"])], cwd=clone, capture_output=True, text=True)


def installations(clone: Path) -> int:
    return len((clone / "installed").read_text().splitlines())


def test_make_installs_once_and_again_when_the_pins_change(clone):
    assert make(clone).returncode == 0 and make(clone).returncode == 0
    assert installations(clone) == 1
    with (clone / "requirements.txt").open("a") as pins:
        pins.write("one-more==1.0\n")
    assert make(clone).returncode == 0
    assert installations(clone) == 2


def test_a_broken_installation_does_not_pass_for_a_complete_one(clone):
    (clone / "broken").touch()
    assert make(clone).returncode != 0
    (clone / "broken").unlink()
    assert make(clone).returncode == 0
    assert installations(clone) == 2


def test_a_moved_clone_is_installed_anew_since_venvs_know_their_place(clone):
    make(clone)
    moved = clone.rename(clone.with_name("moved"))
    make(moved)
    assert installations(moved) == 2


def test_without_a_python_make_says_what_to_do(clone):
    result = make(clone, "PYTHON=")
    assert result.returncode != 0
    assert "Install Python 3.11, or name one" in result.stdout


# torch: which build, and what a learner is told before it is downloaded


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder of made-up wheels as pip's only source: shelf(version, needs) puts a torch of a few hundred bytes there."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.chdir(ROOT)

    def put(version: str, needs: str) -> None:
        wheel = zipfile.ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w")
        with wheel:
            about = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\nRequires-Dist: {needs}\n"
            wheel.writestr(f"torch-{version}.dist-info/METADATA", about)
            wheel.writestr(f"torch-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"torch-{version}.dist-info/RECORD", "")

    return put


CUDA_NEEDS = 'nvidia-cublas==13.1; platform_system == "Linux"'


def test_without_gpus_a_cuda_build_is_announced_with_the_way_to_avoid_it(shelf, monkeypatch, capsys):
    shelf(PINS["torch"], CUDA_NEEDS)
    monkeypatch.setattr(install, "count_gpus", lambda: 0)
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert install.torch_index(sys.executable) == []
    assert "make lab TORCH_INDEX=<address>" in capsys.readouterr().out


def test_a_cpu_build_is_preferred_and_needs_no_announcement(shelf, monkeypatch, capsys):
    shelf(PINS["torch"], CUDA_NEEDS)
    shelf(PINS["torch"] + "+cpu", "filelock")
    monkeypatch.setattr(install, "count_gpus", lambda: 0)
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    assert install.torch_index(sys.executable) == []
    assert "TORCH_INDEX" not in capsys.readouterr().out


def test_a_torch_that_pip_cannot_find_ends_the_installation_with_pips_words(shelf, monkeypatch):
    shelf("1.0", "filelock")
    with pytest.raises(SystemExit, match=r"(?s)No matching distribution.*pip finds no torch=="):
        install.takes_cuda(sys.executable)


def test_the_index_that_was_named_is_taken_unseen(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_INDEX", "https://wheels.invalid/cpu")
    monkeypatch.setattr(install, "count_gpus", lambda: 0)
    monkeypatch.setattr(install, "takes_cuda", lambda python: pytest.fail("pip was asked"))
    assert install.torch_index("python") == ["--extra-index-url", "https://wheels.invalid/cpu"]


@pytest.mark.parametrize("pasted, address", [
    ("https://wheels.invalid/cpu", "https://wheels.invalid/cpu"),
    ("pip3 install torch --index-url https://wheels.invalid/cpu ", "https://wheels.invalid/cpu"),
    ("", ""), ("no thanks", "")])
def test_a_person_may_paste_the_address_or_the_whole_command(monkeypatch, pasted, address):
    monkeypatch.setattr("builtins.input", lambda question: pasted)
    assert install.ask() == address


def test_with_gpus_the_cuda_build_comes_without_a_question(monkeypatch, capsys):
    monkeypatch.setattr(install.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(
        a, 0, "GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n"))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    assert install.torch_index("python") == []
    assert "2 NVIDIA GPUs" in capsys.readouterr().out


def test_an_environment_is_made_also_where_python_came_without_ensurepip(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    asked = []
    monkeypatch.setattr(install, "pip", lambda python, *arguments, before=(): asked.append((python, arguments, before)))
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    python = install.create(tmp_path / "venv")
    assert asked == [(sys.executable, (f"pip=={PINS['pip']}",), ["--python", python])]
    assert subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True).stdout.strip() \
        == str(tmp_path / "venv")


def test_without_ensurepip_and_pip_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="python3-venv"):
        install.create(tmp_path / "venv")


def test_pips_own_words_are_shown_when_it_fails(shelf):
    with pytest.raises(SystemExit, match="(?s)no-such-package.*run make again"):
        install.pip(sys.executable, "--dry-run", "no-such-package")
