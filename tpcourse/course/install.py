"""What `make lab` runs before anything is installed: .venv from the pins in requirements.txt. Standard library only."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = "requirements.txt"
CUDA = "nvidia|cuda|triton"  # how the names of the packages begin that only a CUDA build of torch needs
LAB_SETTINGS = {  # what a learner should not be asked on the first morning
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
}
HINT = """
This machine has no NVIDIA GPU, but pip would take torch's CUDA build: a download of several GB. The CPU build does
everything this course needs, in a tenth of that. To get it, open "Get started" on PyTorch's site, choose Stable, Pip and
CPU, and give the address that the command there shows: make lab TORCH_INDEX=<address>
"""


def main(task: str) -> None:
    """Build .venv from the pins (`venv`), or write the pins anew from pyproject.toml's ranges (`pins`)."""
    os.chdir(ROOT)
    try:
        {"venv": build, "pins": write_pins}[task]()
    except KeyboardInterrupt:
        sys.exit("\nStopped. Nothing is lost: the next make starts the installation again.")


def build() -> None:
    """A fresh .venv with every pin and this package in it; whatever an interrupted run left there goes first."""
    python = create(Path(".venv"))
    index = torch_index(python)
    count = len(re.findall("==", Path(PINS).read_text()))
    print(f"Installing {count} packages into .venv; the first time this takes a minute or more.", flush=True)
    pip(python, "-r", PINS, *index)
    pip(python, "--no-deps", "--no-build-isolation", "-e", ".")
    settings = Path(".venv/share/jupyter/lab/settings/overrides.json")
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(LAB_SETTINGS, indent=1))
    subprocess.run([python, "-c", "import torch; print('Ready: torch', torch.__version__, 'sees', "
                    "torch.cuda.device_count(), 'GPUs.')"], check=True)


def create(path: Path) -> str:
    """An empty environment with the pinned pip, also where Debian's Python came without ensurepip; returns its python."""
    shutil.rmtree(path, ignore_errors=True)
    venv.EnvBuilder(symlinks=True).create(path)
    python, pinned = str(path / "bin/python"), re.search(r"^pip==\S+", Path(PINS).read_text(), re.M).group()
    if importlib.util.find_spec("ensurepip"):
        subprocess.run([python, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
        pip(python, pinned)
    elif importlib.util.find_spec("pip"):
        pip(sys.executable, pinned, before=["--python", python])
    else:
        sys.exit(f"{sys.executable} has neither ensurepip nor pip. On Debian and Ubuntu: sudo apt install python3-venv")
    return python


def pip(python: str, *arguments: str, before: list[str] = []) -> None:
    """Run `pip install`; a terminal sees its latest step on one line, and everybody its last lines if it fails."""
    command = [python, "-m", "pip", "--no-input", "--disable-pip-version-check", *before, "install", *arguments]
    lines, live = [], sys.stdout.isatty()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            if live and re.match(r"\s*(Collecting|Downloading|Installing)", line):
                print("\r\033[K  " + line.strip()[:76], end="", flush=True)
    print("\r\033[K" if live else "", end="")
    if process.returncode:
        sys.exit("".join(lines[-20:]) + "\npip could not install this. Put right what it says, then run make again.")


def torch_index(python: str) -> list[str]:
    """pip's options for torch: the index in TORCH_INDEX if given; says which build comes, and asks before gigabytes."""
    given = os.environ.get("TORCH_INDEX", "").strip()
    gpus = count_gpus()
    if not gpus and not given and takes_cuda(python):
        print(HINT, flush=True)
        given = ask() if sys.stdin.isatty() else ""
    wanted = f"from {given}" if given else "its CUDA build, several GB" if gpus else "the build that pip finds"
    print(f"{gpus or 'No'} NVIDIA GPU{'s' if gpus > 1 else ''} here; torch: {wanted}.", flush=True)
    return ["--extra-index-url", given] if given else []


def ask() -> str:
    """The address that a person pastes, alone or within PyTorch's own command; empty if they only press Enter."""
    answer = input("Paste that address or command here, or press Enter to download the CUDA build: ")
    return next(iter(re.findall(r"https?://\S+", answer)), "")


def count_gpus() -> int:
    """The NVIDIA GPUs of this machine, as nvidia-smi lists them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+", listed, re.M))


def takes_cuda(python: str) -> bool:
    """Whether the torch that pip would install here asks for CUDA's libraries; reads its metadata, not the wheel."""
    pinned = re.search(r"^torch==\S+", Path(PINS).read_text(), re.M).group()
    command = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
               "--report", "-", pinned]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        sys.exit(answer.stderr + f"\npip finds no {pinned} for this machine and {sys.version.split()[0]}.")
    needs = json.loads(answer.stdout)["install"][0]["metadata"].get("requires_dist", [])
    return sys.platform == "linux" and any(re.match(CUDA, need) for need in needs)


def write_pins() -> None:
    """requirements.txt from the newest releases that pyproject.toml allows and that the oldest Python 3.11 takes."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"] + ["pip", "setuptools"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-",
               "--target", "build", "--python-version", "3.11.0", "--only-binary=:all:", *wanted]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = {part["metadata"]["name"]: part["metadata"]["version"].split("+")[0] for part in report["install"]}
    pins = [f"{name}=={found[name]}" for name in sorted(found, key=str.lower) if not re.match(CUDA, name)]
    head = [line for line in Path(PINS).read_text().splitlines() if line.startswith("#") or ";" in line]
    Path(PINS).write_text("\n".join(head + pins) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
