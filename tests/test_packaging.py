"""What the sdist and the wheel hold, and that each kind of install works in an empty environment, from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

import mlx_ttd

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mlx_ttd/_version.py").read_text())[1]
TEXTS = sorted(path.name for path in (ROOT / "csrc/kernels").iterdir())
DEBUG = "cmake.build-type=Debug"
READ_TEXTS = """
from importlib.resources import files
for path in sorted(files("mlx_ttd.kernels").joinpath("texts").iterdir(), key=lambda path: path.name):
    print(path.name, len(path.read_bytes()))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**inherited, **environment})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*paths: str) -> list[str]:
    """Files of the checkout that git knows or does not ignore; a link to a directory counts as itself."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *paths], cwd=ROOT, capture_output=True)
    return sorted(name for name in listed.stdout.decode().split() if os.path.lexists(ROOT / name))


def texts_in(python: Path | str, cwd: Path) -> list[str]:
    return run(python, "-W", "error", "-c", READ_TEXTS, cwd=cwd).splitlines()


SIZES = [f"{name} {(ROOT / 'csrc/kernels' / name).stat().st_size}" for name in TEXTS]


def test_version_stands_in_one_place():
    assert mlx_ttd.__version__ == VERSION
    stated = [
        name for name in tracked("*.py", "*.toml") if re.search(rf'version.* = "{VERSION}"', (ROOT / name).read_text())
    ]
    assert stated == ["mlx_ttd/_version.py"]


def test_kernel_texts_are_package_data():
    texts = files("mlx_ttd.kernels").joinpath("texts")
    assert sorted(path.name for path in texts.iterdir()) == TEXTS
    assert all(texts.joinpath(name).read_bytes() == (ROOT / "csrc/kernels" / name).read_bytes() for name in TEXTS)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


def environment(folder: Path, *install: str | Path, cwd: Path | None = None, **variables: str) -> Path:
    """The commands of a new environment that holds `install`, and no pip, which takes seconds to put there."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python"]
    run(*pip, "install", "-q", *install, cwd=cwd or folder.parent, **variables)
    return folder / "bin"


@pytest.fixture(scope="module")
def distributions(checkout, tmp_path_factory) -> tuple[Path, Path]:
    """(sdist, wheel), the wheel built from the unpacked sdist.

    Its native part is not optimised, which is sooner built; .ci/run installs by the README's command, which is.
    """
    out = tmp_path_factory.mktemp("dist")
    tools = environment(tmp_path_factory.mktemp("build") / "venv", "build")
    run(tools / "python", "-W", "error", "-m", "build", "-C", DEBUG, "--outdir", out, checkout, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_sdist_holds_package_and_sources_without_tests(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    documents = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "PKG-INFO", "pyproject.toml"}
    package = {name for name in tracked("mlx_ttd", "csrc") if (ROOT / name).is_file() and "/tests/" not in name}
    assert names == documents | package | {f"mlx_ttd/kernels/texts/{name}" for name in TEXTS}


@pytest.mark.slow
def test_wheel_holds_package_native_part_and_kernel_texts(distributions):
    names = zipfile.ZipFile(distributions[1]).namelist()
    info = f"mlx_ttd-{VERSION}.dist-info/"
    native = [name for name in names if name.startswith("mlx_ttd/_native.")]
    assert len(native) == 2, f"{distributions[1].name} was built without its native part"
    package = {name for name in tracked("mlx_ttd") if (ROOT / name).is_file()}
    metadata = {info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert set(names) - set(native) == package | metadata | {f"mlx_ttd/kernels/texts/{name}" for name in TEXTS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "without a compiler", "editable"])
def test_install_works_from_another_directory(kind, checkout, distributions, tmp_path):
    sdist, wheel = distributions
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv = tmp_path / "venv"
    if kind == "wheel":
        bin_ = environment(venv, wheel)
    elif kind == "editable":
        bin_ = environment(venv, "-C", DEBUG, "-e", ".", cwd=checkout)
    else:
        bin_ = environment(venv, sdist, CC="/no/compiler", CXX="/no/compiler")
    assert texts_in(bin_ / "python", elsewhere) == SIZES
    assert run(bin_ / "mlx-ttd", "--version", cwd=elsewhere).split()[-1] == VERSION
    assert run(bin_ / "mlx-ttd", "generate", "In the beginning", "--max-tokens", "4", cwd=elsewhere).strip()
    block = run(bin_ / "mlx-ttd", "doctor", cwd=elsewhere)
    assert "problem:" not in block
    assert ("installed without its native part" in block) == (kind == "without a compiler")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_readme_way_to_cuda_leaves_one_backend(distributions, tmp_path):
    """The command of the README, less the dependencies: they are gigabytes and bring no libmlx."""
    venv = environment(tmp_path / ".venv", "pip", distributions[1]).parent
    (command,) = re.findall(r"^\S*pip uninstall -y mlx-cpu && .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    run("bash", "-euc", command, cwd=tmp_path, PIP_NO_DEPS="1")
    check = """
from hashlib import sha256
from base64 import urlsafe_b64encode
from importlib.metadata import files
from runpy import run_path
import sys
doctor = run_path(sys.argv[1])
(library,) = (file for file in files("mlx-cuda-13") if file.name == "libmlx.so")
digest = urlsafe_b64encode(sha256(library.read_binary()).digest()).decode().rstrip("=")
print(*doctor["backends_installed"](), *doctor["problems"](), digest == library.hash.value)
"""
    (doctor,) = venv.rglob("mlx_ttd/observe/doctor.py")
    assert run(venv / "bin/python", "-c", check, doctor, cwd=tmp_path).strip() == "mlx-cuda-13 True"
