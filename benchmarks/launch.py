"""How fast five ways to run a function on N ranks are, from a real Jupyter kernel, side by side in one run.

    python benchmarks/launch.py                 # 4 and 8 ranks, three rounds, a few minutes
    python benchmarks/launch.py --markdown      # the same, and the table goes into README.md

A contender is a handful of cells, and the time of a cell is what a person waits: from sending it to the kernel
until the kernel is idle again. Every contender gets a fresh kernel in every round, so that noise hits all alike.
What does not end is given up at a time limit, and the table says so. Needs jupyter_client and ipykernel;
accelerate, ipyparallel and ray are compared where they are installed.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

import psutil
from jupyter_client.manager import KernelManager
from report import aligned, machine, markdown, put_into

ROOT = Path(__file__).parents[1]
LIMIT_S = 60  # what takes longer is given up
HANG_S = 20  # the same for a rank that raises
FRESH, WARM = 5, 30  # repetitions in each round; fresh ranks fewer where that would take more than FRESH_S
FRESH_S, SHARE_S = 3, 22  # after so many seconds a contender does not repeat; takes part in no further round
SETTLE_S = 3  # after the first result, for what a launcher then does in the background
MESSAGE = "these shapes do not fit"  # what rank 2 raises; a rank in the report must come from the launcher

FUNCTIONS = f'''
import os, tempfile, torch, torch.distributed as dist
def reduce_one():
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()
def work(fail):
    if fail and dist.get_rank() == 2:
        raise ValueError({MESSAGE!r})
    return reduce_one()
def join(rank, count, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=count)
def join_and_work(rank, count, path, fail=False):
    join(rank, count, path)
    value = work(fail)
    dist.destroy_process_group()
    return value
def new_path():
    return os.path.join(tempfile.mkdtemp(dir=os.getcwd()), "store")
'''


@dataclass(frozen=True)
class Contender:
    """One launcher as cells, in which P stands for the number of ranks.

    ``imports`` runs first and is not timed; ``first`` is the session's first result; ``fresh`` makes new ranks,
    runs one all-reduce and ends them; ``fails`` is the same with an exception on rank 2; ``hold`` makes ranks that
    stay for ``warm``, which is empty where no rank outlives a call.
    """

    name: str
    package: str
    imports: str
    first: str
    fresh: str
    fails: str
    hold: str = ""
    warm: str = ""


CONTENDERS = [
    Contender(
        "tpcourse", "torch",  # tpcourse itself is this repository
        imports=FUNCTIONS + "import tpcourse as tp",
        first="%load_ext tpcourse\ntp.spawn(lambda mesh: work(False), ranks=P)",
        fresh="tp.spawn(lambda mesh: work(False), ranks=P)",
        fails="tp.spawn(lambda mesh: work(True), ranks=P)",
        hold="world = tp.World(ranks=P)",
        warm="world.run(lambda mesh: 1)"),
    Contender(
        "torch mp.spawn", "torch",
        imports="%%writefile in_a_file.py\n" + FUNCTIONS,
        first="import torch.multiprocessing as mp, in_a_file\n"
        "mp.spawn(in_a_file.join_and_work, (P, in_a_file.new_path()), nprocs=P)",
        fresh="mp.spawn(in_a_file.join_and_work, (P, in_a_file.new_path()), nprocs=P)",
        fails="mp.spawn(in_a_file.join_and_work, (P, in_a_file.new_path(), True), nprocs=P)"),
    Contender(
        "notebook_launcher", "accelerate",
        imports=FUNCTIONS + "from accelerate import notebook_launcher\n"
        "def main(path, fail=False): return join_and_work(int(os.environ['RANK']), P, path, fail)",
        first="notebook_launcher(main, (new_path(),), num_processes=P)",
        fresh="notebook_launcher(main, (new_path(),), num_processes=P)",
        fails="notebook_launcher(main, (new_path(), True), num_processes=P)"),
    Contender(
        "ipyparallel", "ipyparallel",
        imports="%%writefile in_a_file.py\n" + FUNCTIONS,
        first="import ipyparallel as ipp, in_a_file\n"
        "def start():\n"
        "    cluster = ipp.Cluster(n=P)\n"
        "    return cluster, cluster.start_and_connect_sync()\n"
        "def run(client, function, *args):\n"
        "    return [r.get() for r in [client[i].apply_async(function, i, P, *args) for i in range(P)]]\n"
        "cluster, client = start()\n"
        "run(client, in_a_file.join_and_work, in_a_file.new_path())",
        fresh="other, theirs = start()\n"
        "run(theirs, in_a_file.join_and_work, in_a_file.new_path())\n"
        "other.stop_cluster_sync()",
        fails="run(client, in_a_file.join_and_work, in_a_file.new_path(), True)",
        warm="client[:].apply_sync(lambda: 1)"),
    Contender(
        "Ray actors", "ray",
        imports=FUNCTIONS + "os.environ['RAY_USAGE_STATS_ENABLED'] = '0'\nimport ray",
        first="ray.init(num_cpus=P, include_dashboard=False, logging_level='ERROR', log_to_driver=False)\n"
        "@ray.remote\n"
        "class Rank:\n"
        "    def call(self, function, *args): return function(*args)\n"
        "def start(): return [Rank.options(num_cpus=0).remote() for _ in range(P)]\n"
        "def run(ranks, *args):\n"
        "    return ray.get([r.call.remote(join_and_work, i, P, *args) for i, r in enumerate(ranks)])\n"
        "def once(*args):\n"
        "    ranks = start()\n"
        "    try: return run(ranks, new_path(), *args)\n"
        "    finally: [ray.kill(r) for r in ranks]\n"
        "once()",
        fresh="once()",
        fails="once(True)",
        hold="ranks = start()\nrun(ranks, new_path())",
        warm="ray.get([r.call.remote(lambda: 1) for r in ranks])"),
]

USE_THREADS = "import torch\ntorch.set_num_threads(4)\n_ = torch.ones(1000, 1000) @ torch.ones(1000, 1000)"
THREADED = '''
def main(mesh_or_path=None):
    torch.set_num_threads(4)
    return (torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum().item()
'''
RECORD = '''
import json, statistics, time, torch, torch.distributed as dist, tpcourse as tp
from tpcourse.comm import copy_to_region

detail = None

def seconds(mesh, what, calls):
    global detail
    if detail is None:  # a group made while the debug level is DETAIL is checked call by call
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        detail = dist.new_group(list(range(mesh.size())))
        dist.set_debug_level(dist.DebugLevel.OFF)
    one, x = torch.ones(1), torch.randn(128, 512, requires_grad=True)
    a = torch.randn(512, 2048 // mesh.size())
    def column():
        (copy_to_region(x, mesh["tp"]) @ a).sum().backward()
    step = {"one": lambda: dist.all_reduce(one), "detail": lambda: dist.all_reduce(one, group=detail),
            "column": column}[what]
    step(), dist.barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - begun) / calls

kinds = {"off": ("one", 50, False), "on": ("one", 50, True), "detail": ("detail", 20, False),
         "column off": ("column", 20, False), "column on": ("column", 20, True)}
times = {name: [] for name in kinds}
with tp.World(ranks=P) as world:
    for _ in range(8):
        for name, (what, calls, record) in kinds.items():
            times[name].append(max(world.run(seconds, what, calls, record=record)))
print("JSON" + json.dumps({name: statistics.median(values[1:]) for name, values in times.items()}))
'''


@dataclass
class Outcome:
    """What a cell did: seconds until the kernel was idle, what it printed, the error it showed ("" if none)."""

    seconds: float
    text: str = ""
    error: str = ""
    hung: bool = False


class Kernel:
    """A Jupyter kernel in an empty folder of its own; closing it ends every process that came from it."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path}
        self.manager = KernelManager()
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel(cwd=self.folder.name, env=env, stderr=subprocess.DEVNULL)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def run(self, code: str, limit: float = LIMIT_S) -> Outcome:
        """Run a cell; past ``limit`` seconds it counts as hung, and the kernel is of no use any more."""
        outcome, begun = Outcome(0.0), time.perf_counter()
        message_id = self.client.execute(code, allow_stdin=False)
        while (left := begun + limit - time.perf_counter()) > 0:
            with contextlib.suppress(Empty):
                message = self.client.get_iopub_msg(timeout=left)
                if message["parent_header"].get("msg_id") == message_id and _is_idle(outcome, message):
                    outcome.seconds = time.perf_counter() - begun
                    return outcome
        outcome.hung, outcome.seconds = True, limit
        return outcome

    def __enter__(self) -> "Kernel":
        return self

    def __exit__(self, *_) -> None:
        kernel = psutil.Process(self.manager.provisioner.pid)
        family = [kernel, *kernel.children(recursive=True)]
        self.client.stop_channels()
        kernel.kill()
        _, alive = psutil.wait_procs(family, timeout=2)  # who notices by himself may tidy up
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        self.manager.shutdown_kernel(now=True)
        self.folder.cleanup()


def _is_idle(outcome: Outcome, message: dict) -> bool:
    """Take in one message of a cell; True when it says that the cell is done."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        outcome.text += content["text"]
    elif kind == "error":
        outcome.error = f"{content['ename']}: {content['evalue']}".strip()
    return kind == "status" and content["execution_state"] == "idle"


def judge(outcome: Outcome) -> str:
    """What the error of a cell in which rank 2 raised tells: the rank to blame, and whether in its own words."""
    if outcome.hung:
        return f"nothing within {HANG_S} s"
    if not outcome.error:
        return "no error"
    blamed = re.search(r"\b(?:rank|process)[\s:]*(\d+)\b", outcome.error, re.IGNORECASE)
    rank = "no rank named" if not blamed else "rank 2" if blamed[1] == "2" else f"wrong rank ({blamed[1]})"
    return rank + (", its message" if MESSAGE in outcome.error else ", its message lost")


class Results:
    """Seconds by (contender, ranks, measurement), remarks about them, and what has been given up."""

    def __init__(self) -> None:
        self.seconds: dict[tuple, list[float]] = {}
        self.remarks: dict[tuple, str] = {}
        self.given_up: set[tuple] = set()
        self.spent: dict[tuple, float] = defaultdict(float)  # seconds by (contender, ranks)

    def measure(self, kernel: Kernel, key: tuple, code: str, times: int = 1, limit: float = LIMIT_S) -> bool:
        """Time a cell; False when it hung or went wrong, which ends the contender's part."""
        begun = time.perf_counter()
        for _ in range(times):
            if self.seconds.get(key) and time.perf_counter() - begun > FRESH_S:
                break
            outcome = kernel.run(code, limit)
            if key[2] == "fails":
                seen = [remark for remark in [self.remarks.get(key)] if remark]
                if judge(outcome) not in "".join(seen):
                    self.remarks[key] = " or ".join([*seen, judge(outcome)])
            elif outcome.hung or outcome.error:
                what = outcome.error.splitlines() or [f"nothing within {limit} s"]
                self.remarks[key] = what[-1][:40]
            if outcome.hung or (outcome.error and key[2] != "fails"):
                self.given_up.add(key[:2])
                return False
            self.seconds.setdefault(key, []).append(outcome.seconds)
        return True

    def median_ms(self, key: tuple) -> float | None:
        return statistics.median(self.seconds[key]) * 1e3 if key in self.seconds else None


def session(contender: Contender, count: int, results: Results) -> None:
    """One contender's cells in a kernel of its own; the failing one last, as it may leave the kernel useless."""
    def cell(name: str) -> str:
        return re.sub(r"\bP\b", str(count), getattr(contender, name))

    def key(name: str) -> tuple:
        return contender.name, count, name

    with Kernel() as kernel:
        kernel.run(cell("imports"))
        if not results.measure(kernel, key("first"), cell("first")):
            return
        time.sleep(SETTLE_S)
        if not results.measure(kernel, key("fresh"), cell("fresh"), FRESH):
            return
        if contender.warm:
            kernel.run(cell("hold"))
            kernel.run(cell("warm"))
            results.measure(kernel, key("warm"), cell("warm"), WARM)
            results.measure(kernel, ("empty cell", count, "warm"), "pass", WARM)
        results.measure(kernel, key("fails"), cell("fails"), limit=HANG_S)


def after_threads() -> list[str]:
    """What becomes of fresh ranks when the kernel has multiplied matrices with several threads before."""
    cells = {"tpcourse": "import tpcourse as tp; launch = lambda: tp.spawn(main, ranks=2)",
             "notebook_launcher": "from accelerate import notebook_launcher\n"
                                  "launch = lambda: notebook_launcher(main, num_processes=2)"}
    lines = []
    for contender in CONTENDERS:
        if contender.name in cells and is_installed(contender):
            with Kernel() as kernel:
                kernel.run(USE_THREADS + THREADED + cells[contender.name])
                outcome = kernel.run("launch()", HANG_S)
            end = f"nothing within {HANG_S} s, a deadlock" if outcome.hung else outcome.error.partition("\n")[0] or "fine"
            lines.append(f"{contender.name}, after the kernel itself has used torch's threads: {end}")
    return lines


def record_costs(count: int) -> list[str]:
    """What the record of calls, and torch's own DETAIL mode, cost a call; ratios to the same call without them."""
    with Kernel() as kernel:
        outcome = kernel.run(re.sub(r"\bP\b", str(count), RECORD), 3 * LIMIT_S)
    found = re.search(r"^JSON(.*)$", outcome.text, re.MULTILINE)
    if not found:
        return [f"{count} ranks: record not measured: {outcome.error or 'nothing within the limit'}"]
    s = json.loads(found[1])
    return [f"{count} ranks: all-reduce of one float {s['off'] * 1e3:.2f} ms; "
            f"with the record of calls x{s['on'] / s['off']:.2f}; with torch's DETAIL mode x{s['detail'] / s['off']:.1f}",
            f"{count} ranks: column-parallel forward and backward {s['column off'] * 1e3:.2f} ms; "
            f"with the record of calls x{s['column on'] / s['column off']:.2f}"]


COLUMNS = {"first": "first of a session", "fresh": "fresh ranks, one all-reduce",
           "warm": "call on ranks that exist", "fails": "rank 2 raises: the error"}


def is_installed(contender: Contender) -> bool:
    return importlib.util.find_spec(contender.package) is not None


def show_cell(results: Results, contender: Contender, count: int, name: str) -> str:
    """One cell of the table: milliseconds, how many times tpcourse's, and a remark."""
    key = (contender.name, count, name)
    value, ours = results.median_ms(key), results.median_ms((CONTENDERS[0].name, count, name))
    remark = results.remarks.get(key, "")
    if value is None:
        return remark or "-"
    ratio = ""
    if ours and contender is not CONTENDERS[0]:
        ratio = f" (x{value / ours:.{0 if value > 9.5 * ours else 1}f})"
    return f"{value:,.{0 if value >= 20 else 1}f} ms{ratio}" + (f"; {remark}" if remark else "")


def table(results: Results, ranks: list[int]) -> list[list[str]]:
    rows = [["ranks", "launcher", *COLUMNS.values()]]
    for count in ranks:
        for contender in CONTENDERS:
            cells = [show_cell(results, contender, count, name) for name in COLUMNS]
            if not is_installed(contender):
                cells = ["not installed"] + ["-"] * (len(COLUMNS) - 1)
            rows.append([str(count), contender.name, *cells])
    return rows


def compare(ranks: list[int], rounds: int) -> Results:
    """All contenders, round after round, so that whatever else the machine does hits all alike."""
    results = Results()
    for turn in range(rounds):
        for count in ranks:
            for contender in filter(is_installed, CONTENDERS):
                key = (contender.name, count)
                if key in results.given_up or results.spent[key] > SHARE_S:
                    continue
                print(f"round {turn + 1} of {rounds}, {count} ranks, {contender.name}", file=sys.stderr)
                begun = time.perf_counter()
                session(contender, count, results)
                results.spent[key] += time.perf_counter() - begun
    return results


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="at least 3: rank 2 is to raise")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="put the table into README.md")
    options = parser.parse_args(argv)
    if min(options.ranks) < 3:
        parser.error(f"--ranks {min(options.ranks)}: take at least 3, for rank 2 is to raise")
    notes = [machine()]
    results = compare(options.ranks, options.rounds)
    for count in options.ranks:
        if empty := results.median_ms(("empty cell", count, "warm")):
            notes.append(f"{count} ranks: an empty cell takes {empty:.1f} ms, and is part of every figure")
    notes += [line for count in options.ranks for line in record_costs(count)] + after_threads()
    rows = table(results, options.ranks)
    print("\n".join([aligned(rows), "", *notes]))
    if options.markdown:
        put_into(ROOT / "README.md", "launch", markdown(rows, notes))


if __name__ == "__main__":
    main()
