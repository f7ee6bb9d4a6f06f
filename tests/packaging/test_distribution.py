"""What is published: the wheel and the source distribution, as pip builds them."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]

pytest.importorskip("build")
pytest.importorskip("hatch_vcs")


def build(source: Path, target: Path, *options: str, path: str = os.environ["PATH"]) -> None:
    """With the build system of this environment: nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", target, source]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def output(command: list[str | Path], folder: Path) -> list[str]:
    """The lines that it prints. What the tests run with, such as a PYTHONPATH, must not help it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a bare environment that has the wheel, and whatever else is needed from this one."""
    folder = tmp_path_factory.mktemp("env")
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (needed,) = {str(Path(path)) for path in sys.path if path.endswith("site-packages")}
    pip = [sys.executable, "-m", "pip", "--python", python]
    output([*pip, "install", "--quiet", "--no-deps", wheel], folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(f"{needed}\n")
    return python


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    ours = {str(path.relative_to(ROOT)) for path in ROOT.glob("nbspawn/**/*") if path.suffix in (".py", ".typed")}
    names = set(wheel.namelist())
    assert ours <= names and "nbspawn/py.typed" in ours
    (metadata,) = {name.partition("/")[0] for name in names} - {"nbspawn"}
    assert metadata.startswith("nbspawn-") and metadata.endswith(".dist-info")
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_source_distribution_has_the_tests(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "nbspawn/__init__.py", "tests/conftest.py"} <= names
    assert not any(name.startswith((".venv", "build", "docs")) for name in names)


def test_an_index_shows_the_description(built: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *built.iterdir()], capture_output=True
    )
    assert checked.returncode == 0, checked.stdout


def test_the_description_has_whole_addresses(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
    links = re.findall(r"(?:\]\(|<img src=\")([^)\"\s]+)", metadata.get_payload())
    assert len(links) > 10 and all(link.startswith("https://") for link in links), links


def test_a_wheel_of_the_source_distribution_needs_no_git(built: Path, tmp_path: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / source.name.removesuffix(".tar.gz"), tmp_path, "--wheel", path="")
    assert {path.name for path in tmp_path.glob("*.whl")} == {path.name for path in built.glob("*.whl")}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_version_is_that_of_the_tag(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    def version() -> str:
        return run(sys.executable, "-m", "hatchling", "version")

    def git(*arguments: str) -> str:
        return run("git", "-c", "user.name=tests", "-c", "user.email=tests@example.org", *arguments)

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    assert version() == "0.1.0.dev0"

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    git("tag", "milestone-7")
    assert re.fullmatch(rf"0\.1\.0\.dev1\+g{git('rev-parse', '--short=7', 'HEAD')}\w*", version())

    git("tag", "v1.2.3")
    assert version() == "1.2.3"

    git("commit", "--quiet", "--allow-empty", "--message=two")
    assert re.fullmatch(rf"1\.2\.4\.dev1\+g{git('rev-parse', '--short=7', 'HEAD')}\w*", version())


def test_the_package_knows_its_version(built: Path, installed: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert output([installed, "-c", "import nbspawn; print(nbspawn.__version__)"], tmp_path) == [
        wheel.name.split("-")[1]
    ]


def test_a_checkout_that_is_not_installed_has_no_version() -> None:
    """``-S``: without site-packages."""
    assert output([sys.executable, "-S", "-c", "import nbspawn; print(nbspawn.__version__)"], ROOT) == ["0+unknown"]


def test_the_wheel_works_where_it_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import nbspawn; print(nbspawn.__file__); print(list(nbspawn.spawn(divmod, (2,), nprocs=2)))"
    file, values = output([installed, "-c", code], tmp_path)
    assert Path(file).is_relative_to(installed.parents[1])
    assert values == "[(0, 0), (0, 1)]"


RUN_NOTEBOOK = """
import sys
import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], as_version=4)
more = ["%%spawn 2 -o files\\nimport nbspawn; nbspawn.__file__", "import nbspawn; print(nbspawn.__file__, *files)"]
notebook.cells += map(nbformat.v4.new_code_cell, more)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
print(notebook.cells[-1].outputs[0].text)
"""


def test_the_quickstart_runs_with_the_wheel(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first cell to its last; the kernel and both ranks have the wheel's nbspawn."""
    pytest.importorskip("sklearn")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))  # no kernel of the user
    line, *_ = output([installed, "-c", RUN_NOTEBOOK, ROOT / "notebooks" / "quickstart.ipynb"], tmp_path)
    files = [Path(file) for file in line.split()]
    assert len(files) == 3 and all(file.is_relative_to(installed.parents[1]) for file in files), files
