"""What is published: the wheel and the source distribution, as pip builds them."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

build = pytest.importorskip("build")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    ours = {str(path.relative_to(ROOT)) for path in ROOT.glob("nbspawn/**/*") if path.suffix in (".py", ".typed")}
    names = set(wheel.namelist())
    assert ours <= names and "nbspawn/py.typed" in ours
    assert all(re.match(r"nbspawn(/|-[\d.]+\.dist-info/)", name) for name in names)
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


def test_the_wheel_works_where_it_is_installed(built: Path, tmp_path: Path) -> None:
    """In a bare environment, whose torch is this one's."""
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    (needed,) = {str(Path(path)) for path in sys.path if path.endswith("site-packages")}
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    (site / "needed.pth").write_text(f"{needed}\n")
    code = "import nbspawn; print(nbspawn.__file__); print(list(nbspawn.spawn(divmod, (2,), nprocs=2)))"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(site / "nbspawn" / "__init__.py"), "[(0, 0), (0, 1)]"], done.stderr
