"""What a user gets from the wheel: the package, its type marker, its command line, what its pages are of, no more."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")


def _run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, run without this process's Python settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for path in [*(ROOT / name for name in SOURCES), *(ROOT / "fxmem").rglob("*")]:
        if path.is_file() and path.suffix != ".pyc":
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    # Without isolation: the build uses the setuptools that is here and fetches nothing.
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment into which only the wheel was installed."""
    venv = tmp_path_factory.mktemp("venv")
    _run(sys.executable, "-m", "venv", venv, cwd=venv)
    interpreter = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    _run(interpreter, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", wheel, cwd=venv)
    # torch and the other dependencies come from the environment that runs the tests, by way of a .pth file: no second
    # copy of them is installed. Its directories come after the new environment's own, so the wheel's fxmem is the one
    # found; and a .pth file inside a directory that was added by a .pth file is not read, so the link to this checkout,
    # which an editable install leaves there, has no effect.
    purelib = _run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv)
    outer = dict.fromkeys(sysconfig.get_path(scheme) for scheme in ("purelib", "platlib"))
    Path(purelib.strip(), "outer.pth").write_text("\n".join(outer) + "\n", encoding="utf-8")
    return interpreter


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    report = ROOT / "fxmem" / "report"
    sources = [*(ROOT / "fxmem").rglob("*.py"), *(report / "assets").iterdir(), *(report / "vendor").iterdir()]
    expected = {path.relative_to(ROOT).as_posix() for path in sources} | {"fxmem/py.typed"}
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_what_is_installed_is_the_package_with_its_pages_and_its_command_line(python: Path, tmp_path: Path) -> None:
    script = (
        "import torch, fxmem\n"
        "print(fxmem.__file__)\n"
        "print(fxmem.__version__)\n"
        "report = fxmem.optimize(torch.nn.Linear(2, 2), torch.randn(4, 2)).fxmem.report\n"
        "report.save_html('page.html')\n"
    )
    file, version = _run(python, "-c", script, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(python.parent.parent)
    assert (
        version == _run(python, "-c", "import importlib.metadata as m; print(m.version('fxmem'))", cwd=tmp_path).strip()
    )
    assert "uPlot" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert _run(python, "-m", "fxmem", "--version", cwd=tmp_path) == f"fxmem {version}\n"
    assert _run(python.with_name("fxmem"), "--version", cwd=tmp_path) == f"fxmem {version}\n"
