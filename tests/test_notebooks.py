"""The lessons as files, the start page, and the machinery that runs lessons. (Their outputs: nbval, see the Makefile.)"""

import json
import re
from pathlib import Path

import nbformat
import pytest

from tpcourse.course import execute
from tpcourse.course.lessons import START, TABLE_CELL, lessons, ranks_used, table, write_table

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_LINES, MOST_BYTES = 20, 1_000_000
MACHINE = rf"(?<![\w.:/])/(tmp|home|root|Users|usr|opt|var)/|{re.escape(str(ROOT))}|ipykernel_\d+|0x[0-9a-f]{{8,}}"
WIDGETS = r"slider|ipywidgets|interact\("


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def images(cell):
    """The (MIME type, metadata) of each image among a cell's outputs."""
    return [(mime, output.metadata.get(mime, {})) for output in cell.outputs
            for mime in output.get("data", {}) if mime.startswith("image/")]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, 4)


def test_a_notebook_is_stored_as_make_notebooks_writes_it(notebook):
    nbformat.validate(notebook)
    metadata = json.dumps(notebook.metadata)
    execute.tidy(notebook)
    assert json.dumps(notebook.metadata) == metadata, "run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small(path):
    assert path.stat().st_size < MOST_BYTES


def test_every_cell_was_run_in_order(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1)), "run `make notebooks`"


def test_code_cells_fit_on_a_screen(notebook):
    long = [cell.source for cell in code(notebook) if len(cell.source.splitlines()) > MOST_LINES]
    assert not long, f"cells of more than {MOST_LINES} lines"


def test_no_cell_stores_an_error_that_its_tags_do_not_announce(notebook):
    for cell in code(notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", [])), cell.source


def test_stored_text_knows_nothing_of_the_machine_that_wrote_it(notebook):
    for cell in code(notebook):
        for output in cell.outputs:
            shown = {mime: text for mime, text in output.get("data", {}).items() if not mime.startswith("image/")}
            words = json.dumps([shown, output.get("text"), output.get("evalue"), output.get("traceback")])
            assert not re.search(MACHINE, words), f"{re.search(MACHINE, words).group()} in the output of\n{cell.source}"


def test_every_figure_has_alt_text(notebook):
    for cell in code(notebook):
        for mime, about in images(cell):
            assert about.get("alt", "").strip(), f"a figure without alt text; show it with tpcourse.show\n{cell.source}"
        for output in cell.outputs:
            for tag in re.findall(r"<img[^>]*>", "".join(output.get("data", {}).get("text/html", ""))):
                assert re.search(r'alt="[^"]+', tag), f"{tag[:80]} without alt text\n{cell.source}"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"!\[\s*\]\(", cell.source), f"a picture without alt text\n{cell.source}"


def test_beside_every_widget_there_is_a_still_figure(notebook):
    cells = code(notebook)
    for i, cell in enumerate(cells):
        if re.search(WIDGETS, cell.source) and not cell.source.startswith(("import", "from")):
            assert any(map(images, cells[max(i - 1, 0):i + 2])), f"no figure in, before or after the cell\n{cell.source}"


def test_links_within_the_course_lead_somewhere(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\((?!https?:|#|attachment:)([^)#]+)", cell.source):
                assert (ROOT / "notebooks" / target).exists(), target


# The start page and the map


def test_the_start_page_lists_the_lessons_that_exist():
    page = nbformat.read(ROOT / "notebooks" / START, 4)
    (cell,) = [cell for cell in page.cells if cell.id == TABLE_CELL]
    assert cell.source == table(ROOT), "run `make notebooks`"


def test_the_readme_maps_the_lessons_that_exist_and_links_no_other():
    readme = (ROOT / "README.md").read_text()
    linked = re.findall(r"^\| (\d\d) \| \[(.+?)\]\(notebooks/(.+?)\)", readme, re.M)
    assert linked == [(lesson.number, lesson.title, lesson.path.name) for lesson in lessons(ROOT)]


def lesson(*sources: str, **about) -> nbformat.NotebookNode:
    about = {"title": "A title", "teaches": "do a thing", "minutes": 7} | about
    return nbformat.v4.new_notebook(metadata={"tpcourse": about}, cells=[nbformat.v4.new_code_cell(s) for s in sources])


@pytest.fixture
def course(tmp_path):
    """A course of its own: course("01_one", notebook) puts a lesson there; a start page is there already."""
    (tmp_path / "notebooks").mkdir()
    start = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("(table)", id=TABLE_CELL)])
    nbformat.write(start, tmp_path / "notebooks" / START)

    def put(name: str, notebook: nbformat.NotebookNode) -> Path:
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    put.root = tmp_path
    return put


def test_the_table_links_lessons_in_order_and_their_exercises(course):
    course("02_two", lesson(title="Two", minutes=9))
    course("01_one", lesson(title="One"))
    (course.root / "exercises" / "02_two").mkdir(parents=True)
    (course.root / "exercises" / "02_two" / "02_two.ipynb").touch()
    write_table(course.root)
    (cell,) = nbformat.read(course.root / "notebooks" / START, 4).cells
    assert cell.source.splitlines()[2:] == [
        "| 01 | [One](01_one.ipynb) | do a thing | 7 |  |",
        "| 02 | [Two](02_two.ipynb) | do a thing | 9 | [open](../exercises/02_two/02_two.ipynb) |"]


def test_a_lesson_that_does_not_say_what_it_teaches_is_refused(course):
    bare = nbformat.v4.new_notebook(metadata={"tpcourse": {"title": "One", "minutes": 3}})
    course("01_one", bare)
    with pytest.raises(ValueError, match="01_one.ipynb.*'teaches'"):
        lessons(course.root)


@pytest.mark.parametrize("source, ranks", [
    ("1 + 1", 1), ("%%ranks tp=4\nx = 8", 4), ("%%ranks dp=2 tp=3 timeout=10 out=values2", 6),
    ('tp.spawn(f, mesh={"dp1": 2, "tp2": 2})', 4), ("tp.World(ranks=3)", 3), ("%%ranks tp=2\n\ntp.spawn(f, ranks=5)", 5)])
def test_the_ranks_of_a_lesson_are_read_from_its_cells(source, ranks):
    assert ranks_used(lesson(source)) == ranks


# Running lessons


def test_make_course_tells_which_cell_failed_and_why_and_runs_the_rest(course, capsys):
    broken = course("01_one", lesson("x = 2", "print(x)", "raise OSError(f'no {x}')", "print('not reached')"))
    course("02_two", lesson("open('made', 'w').close()", "2 + 2"))
    before = broken.read_bytes()
    assert not execute.run_all(course.root)
    shown = capsys.readouterr().out
    assert re.search(r"^01_one +4 +1 +\d+\.\d  NO$", shown, re.M)
    assert re.search(r"^02_two +2 +1 +\d+\.\d  yes$", shown, re.M)
    assert "01_one.ipynb: code cell 3 failed\nraise OSError" in shown and "OSError: no 2" in shown
    assert broken.read_bytes() == before and not (course.root / "notebooks" / "made").exists()


def test_make_course_survives_a_lesson_that_kills_its_kernel(course, capsys):
    course("01_one", lesson("1", "import os; os._exit(3)", "2"))
    assert not execute.run_all(course.root)
    shown = capsys.readouterr().out
    assert "01_one.ipynb: code cell 2 failed\nimport os" in shown and "Kernel died" in shown


def test_storing_twice_writes_the_same_bytes_and_keeps_of_a_widget_only_its_text(course):
    source = "import ipywidgets\nipywidgets.IntSlider(3)"
    path = course("01_one", lesson(source, "print('a')\nprint('b')", "1 / 0"))
    notebook = nbformat.read(path, 4)
    notebook.cells[2].metadata["tags"] = ["raises-exception"]
    nbformat.write(notebook, path)
    execute.store(path)
    once = path.read_bytes()
    execute.store(path)
    assert path.read_bytes() == once
    stored = nbformat.read(path, 4)
    assert stored.cells[0].outputs[0].data == {"text/plain": "IntSlider(value=3)"}
    assert [cell.execution_count for cell in stored.cells] == [1, 2, 3]
    assert stored.metadata.tpcourse.title == "A title"


def test_a_notebook_that_fails_is_not_stored(course):
    path = course("01_one", lesson("1 / 0"))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="(?s)code cell 1 failed.*ZeroDivisionError"):
        execute.store(path)
    assert path.read_bytes() == before
