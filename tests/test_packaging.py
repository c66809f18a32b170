"""What is installed, as opposed to what an editable install finds in the tree."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Where each package's files are in the tree.
FOLDERS = {"akjax/scheduler": "scheduler", "akjax/fits": "fits", "akjax": "akjax"}


def test_a_wheel_ships_every_module_and_imports(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "akjax", "scheduler", "fits"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(sources)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "-w", str(tmp_path), str(sources)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("akjax-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)

    shipped = {path.relative_to(installed).as_posix() for path in installed.glob("akjax/**/*.py")}
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).glob("**/*.py")
    }
    assert shipped == expected
    assert (installed / "akjax" / "py.typed").exists()
    fits = {path.name for path in (ROOT / "akjax" / "preset_fits").iterdir()}
    assert {path.name for path in (installed / "akjax" / "preset_fits").iterdir()} == fits

    sdist = "import setuptools.build_meta as build; print(build.build_sdist('..'))"
    done = subprocess.run([sys.executable, "-c", sdist], cwd=sources, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,) = tmp_path.glob("akjax-*.tar.gz")
    with tarfile.open(source) as archive:
        assert fits <= {Path(name).name for name in archive.getnames() if "/akjax/preset_fits/" in name}

    check = f"import sys; sys.path.insert(0, {str(installed)!r}); import akjax.fits; print(akjax.fits.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", check], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(str(installed)), done.stderr
