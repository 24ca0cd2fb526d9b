"""Every widget in JupyterLab, in a real browser: the keyboard moves each control, and the picture follows.

What it looked like is in tests/browser/artefacts, with the milliseconds from key to picture.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium, chromium-browser or google-chrome here")

ARTEFACTS = Path(__file__).parent / "artefacts"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
COSTS = '''
from tpcourse import predict, show
from tpcourse.predict import OneD, ThreeD, TwoD

KINDS = ("parameters", "gradients", "optimizer", "activations")
WAYS = {8: {"1D": OneD(8), "3D": ThreeD(2, 2, 2)}, 16: {"1D": OneD(16), "2D": TwoD(4)},
        64: {"1D": OneD(64), "2D": TwoD(8), "3D": ThreeD(4, 4, 4)}}

def of_all(cost, model, P, batch):
    found = {}
    for name, scheme in WAYS[P].items():
        try:
            found[name] = cost(model, scheme, batch)
        except ValueError:  # these sizes do not split so
            pass
    return found

def gpt(h, s, layers=1):
    return predict.Transformer(51_200, s, h, num_layers=layers, num_heads=64)

def layer_bytes(model, scheme, batch):
    parts = predict.volume(model, scheme, batch)
    return parts["attention"].total() + parts["mlp"].total()

def rank_bytes(model, scheme, batch):
    parts = predict.memory(model, scheme, batch).values()
    return {kind: sum(getattr(part, kind) for part in parts) for kind in KINDS}

def sent(P, h, s, b):
    return of_all(layer_bytes, gpt(h, s), P, b)

def held(P, s, b):
    return of_all(rank_bytes, gpt(4096, s, 32), P, b)

def least(n, h, P):
    return sent(P, h, n // 64, 64)

def ring(size, alpha, beta, ranks):
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)

def best(model, cluster, budget):
    ways = [(sum(time.total for time in predict.step_time(model, scheme, cluster, 16).values()), scheme)
            for scheme in WAYS[cluster.gpus].values()
            if sum(rank_bytes(model, scheme, 16).values()) <= budget]
    if not ways:
        raise ValueError("no scheme holds so little; take more GPUs")
    seconds, scheme = min(ways, key=lambda way: way[0])
    times = predict.step_time(model, scheme, cluster, 16).values()
    kinds = ("matmul", "elementwise", "messages")
    return show.Answer({kind: sum(getattr(time, kind) for time in times) for kind in kinds},
                       rank_bytes(model, scheme, 16), f"all parts   {scheme}", measured=1.1 * seconds)
'''
A100 = "predict.Cluster(predict.cluster.A100, predict.cluster.NVLINK3, predict.cluster.HDR, nodes={})"
WIDGETS = {
    "explorer": "show.explorer(sent, {(P, 8192, 1024, 16): sent(P, 8192, 1024, 16) for P in WAYS}, "
                "('ranks P', tuple(WAYS)), {'width h': (4096, 8192, 12_288), 'sequence s': (512, 1024, 2048), "
                "'batch b': (4, 16, 64)}, 'One layer, bfloat16, forward and backward')",
    "budget": "show.budget_sliders(held, {(16, 1024, 16): {name: sum(kinds.values()) for name, kinds in "
              "held(16, 1024, 16).items()}}, {'ranks P': tuple(WAYS), 'sequence s': (512, 1024, 2048), "
              "'batch b': (4, 16, 64)}, 80 * 2**30, 'A model of 7 billion parameters')",
    "winners": "show.winners_sliders(least, ('tokens n', [512 * 2**k for k in range(8)]), "
               "('width h', (4096, 8192, 12_288)), {'ranks P': tuple(WAYS)}, 'Who sends least for a layer', "
               "{(n, h, 64): least(n, h, 64) for n, h in ((2048, 12_288), (32_768, 8192))})",
    "bandwidth": "show.bandwidth(ring, {P: [(2.0**k, 1.2 * ring(2.0**k, 3e-5, 1e-9, P)) for k in range(10, 26, 3)] "
                 "for P in (2, 4, 8)}, (3e-5, 1e-9), 'An all-reduce')",
    "planner": "show.planner(best, {'7B': gpt(4096, 1024, 32), '40B': gpt(8192, 1024, 48)}, "
               f"{{'8 A100': {A100.format(1)}, '64 A100': {A100.format(8)}}}, "
               "[k * 10e9 for k in range(1, 9)])",
    "collective": "show.collective_slider('all_reduce', 3)",
    "cube": "show.cube_picker({'i': 2, 'j': 2, 'l': 2})",
    "meshes": "show.mesh_slider({(1, 4, 1): (3000, 2000.0), (2, 2, 1): (2**20, 1500), (4, 1, 1): (4096, 1024)}, "
              "'A block')",
}
IDLE = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
SETTINGS = {"apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
            "notebook-extension/tracker": {"windowingMode": "none"}}  # else outputs below the window are not there
# The picture: its bytes, and what part of them is seen.
STATE = """async name => {
    const all = [...document.querySelectorAll('.jp-OutputArea-output')][name].querySelectorAll('img'), found = []
    for (const image of all) {
        const bytes = new Uint8Array(await (await fetch(image.src)).arrayBuffer())
        const hash = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes))
        found.push(bytes.length + ':' + hash.join() + image.style.objectPosition)
    }
    return found.join(' ')
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a JupyterLab of this interpreter, with settings of its own and one notebook."""
    home = tmp_path_factory.mktemp("lab")
    cells = [nbformat.v4.new_code_cell(source) for source in (COSTS, *WIDGETS.values())]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), home / "widgets.ipynb")
    for name, settings in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    folders = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
               "IPYTHONDIR": "ipython", "JUPYTERLAB_SETTINGS_DIR": "settings",
               "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
               "--ServerApp.port=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={home}"]
    with (home / "log").open("w") as log, subprocess.Popen(
            command, env=os.environ | {name: str(home / folder) for name, folder in folders.items()},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            yield _address(process, home)
        finally:
            process.terminate()  # and with it its kernels


def _address(process, home):
    for _ in range(300):
        for found in (home / "runtime").glob("jpserver-*.json"):
            try:
                return json.loads(found.read_text())["url"]
            except ValueError:  # half written
                pass
        assert process.poll() is None, (home / "log").read_text()
        time.sleep(0.1)
    raise TimeoutError((home / "log").read_text())


@pytest.fixture(scope="module")
def page(server):
    """The notebook, run once; `page.errors` collects what the console says."""
    shutil.rmtree(ARTEFACTS, ignore_errors=True)
    ARTEFACTS.mkdir()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.errors = []
        page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.goto(f"{server}lab/tree/widgets.ipynb")
        page.locator(IDLE).wait_for(timeout=60_000)
        sessions = f"{server}api/sessions"
        while not any(session["kernel"]["connections"] for session in page.request.get(sessions).json()):
            page.wait_for_timeout(100)  # before it has a kernel, JupyterLab asks which one to take
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        outputs = page.locator(".jp-OutputArea-output")
        try:
            outputs.nth(len(WIDGETS) - 1).wait_for(timeout=60_000)
        except playwright.TimeoutError:
            page.screenshot(path=ARTEFACTS / "failed.png")
            pytest.fail("the notebook did not run to its end: " + "\n".join(outputs.all_inner_texts()))
        yield page
        browser.close()


def until(page, number, seen):
    """Waits for a picture that is `seen`, and says the milliseconds that it took."""
    start = time.perf_counter()
    while not seen(page.evaluate(STATE, number)):
        assert time.perf_counter() - start < 10, "the picture did not follow"
    return f"{1000 * (time.perf_counter() - start):.0f}"


def keys(control):
    """What to focus and to press so that the control moves, and so that it moves back."""
    buttons = control.locator("button")
    if buttons.count():
        return [(buttons.last, "Space"), (buttons.first, "Space")]
    return [(control, "ArrowRight"), (control, "ArrowLeft")]


@pytest.mark.parametrize("number, name", list(enumerate(WIDGETS)))
def test_the_keyboard_moves_every_control(page, number, name):
    output = page.locator(".jp-OutputArea-output").nth(number)
    output.locator("img").first.wait_for(timeout=20_000)
    output.scroll_into_view_if_needed()
    output.screenshot(path=ARTEFACTS / f"{name}.png")
    controls = output.locator(".noUi-handle, .widget-toggle-buttons").all()
    assert len(controls) == {"explorer": 5, "budget": 3, "winners": 1, "bandwidth": 3, "planner": 3}.get(name, 1)
    took, first = [], page.evaluate(STATE, number)
    for control in controls:
        for (part, key), seen in zip(keys(control), (first.__ne__, first.__eq__)):
            part.focus()
            page.keyboard.press(key)
            took.append(until(page, number, seen))
            page.locator(IDLE).wait_for()  # the planner's first picture is a pale one
            output.screenshot(path=ARTEFACTS / f"{name}-{len(took)}.png")
    (ARTEFACTS / f"{name}.txt").write_text(" ".join(took) + " ms\n")
    assert page.errors == []


def test_a_mouse_drags_a_slider_to_its_end(page):
    output = page.locator(".jp-OutputArea-output").first
    output.scroll_into_view_if_needed()
    first, track = page.evaluate(STATE, 0), output.locator(".noUi-target").first.bounding_box()
    output.locator(".noUi-handle").first.hover()
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"], track["y"], steps=10)
    page.mouse.up()
    until(page, 0, first.__ne__)
    output.locator(".widget-readout", has_text="64").first.wait_for(timeout=10_000)
    assert page.errors == []
