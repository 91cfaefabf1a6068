"""The house rules of the project: links, layering, the public API, and an import that touches no GPU."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtransfer

ROOT = Path(__file__).resolve().parent.parent
LEVELS = {"kvtransfer.kernels": 0, "kvtransfer.tiers": 1, "kvtransfer": 2, "kvtransfer.integrations": 3}
# Programs stand on top of the library: the demo shows an integration, the command line starts the demo.
PROGRAMS = {
    "kvtransfer.cli",
    "kvtransfer.demo",
    "kvtransfer.demo_model",
    "kvtransfer.demo_report",
    "kvtransfer.verify_local",
    "kvtransfer.verify_run",
}
# They import transformers, which takes seconds and threads of its own.
OVER_TRANSFORMERS = {"kvtransfer.verify_local"} | {
    f"kvtransfer.integrations.{path.stem}"
    for path in (ROOT / "kvtransfer" / "integrations").glob("*.py")
    if "from transformers" in path.read_text(encoding="utf-8") or path.stem.startswith(("transformers", "prefix_"))
}
KERNELS_MAY_IMPORT = {"numpy", "torch", "triton", "kvtransfer"} | set(sys.stdlib_module_names)


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module, each once: not through the links."""
    for folder, package in (("kernels", "kvtransfer.kernels"), ("tiers", "kvtransfer.tiers")):
        for path in sorted((ROOT / folder).glob("*.py")):
            yield f"{package}.{path.stem}", path
    for path in sorted((ROOT / "kvtransfer").glob("*.py")):
        yield f"kvtransfer.{path.stem}".removesuffix(".__init__"), path
    for path in sorted((ROOT / "kvtransfer" / "integrations").glob("*.py")):
        yield f"kvtransfer.integrations.{path.stem}".removesuffix(".__init__"), path


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it. Names imported from a package count as modules too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def level(name: str) -> int:
    """How high a module stands: the longest package name of LEVELS that it lies in."""
    if any(name == program or name.startswith(program + ".") for program in PROGRAMS):
        return max(LEVELS.values()) + 1
    packages = [p for p in LEVELS if name == p or name.startswith(p + ".")]
    return LEVELS[max(packages, key=len)]


def level_or_foreign(name: str) -> int:
    """`level` of our modules, -1 of others'."""
    return level(name) if name.split(".")[0] == "kvtransfer" else -1


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_one_way(name: str, path: Path) -> None:
    own = {found for found in imports(path) if found.split(".")[0] == "kvtransfer"}
    upward = sorted(found for found in own if level(found) > level(name) and found != "kvtransfer")
    assert not upward, f"{name} imports {upward}: imports go kernels <- tiers <- kvtransfer <- integrations <- programs"
    if level(name) < LEVELS["kvtransfer"]:
        assert "kvtransfer" not in own, f"{name} imports the package itself, which loads what stands above it"


def test_the_library_imports_no_integration_and_no_program() -> None:
    for name, path in modules():
        if level(name) <= LEVELS["kvtransfer"]:
            above = [found for found in imports(path) if level_or_foreign(found) > LEVELS["kvtransfer"]]
            assert not above, f"{name} imports {above}"


def test_kernels_import_little() -> None:
    for name, path in modules():
        if level(name) == 0:
            foreign = {found.split(".")[0] for found in imports(path)} - KERNELS_MAY_IMPORT
            assert not foreign, f"{name} imports {foreign}"


def test_links_and_flat_folders() -> None:
    for folder in ("kernels", "tiers"):
        link = ROOT / "kvtransfer" / folder
        assert link.is_symlink(), f"{link} is not a link"
        assert link.readlink() == Path("..") / folder
        assert not (ROOT / folder / "__init__.py").exists(), "an __init__.py here breaks the editable install"
        assert not [p for p in (ROOT / folder).iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert not (ROOT / "conftest.py").exists()


def test_packages_are_listed_and_data_ships() -> None:
    setuptools = project()["tool"]["setuptools"]
    inner = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "kvtransfer").glob("*/**/__init__.py")}
    assert setuptools["packages"] == sorted({*LEVELS, *inner})
    assert setuptools["package-dir"]["kvtransfer.kernels"] == "kernels"
    assert setuptools["package-dir"]["kvtransfer.tiers"] == "tiers"
    inside = {str(p.relative_to(ROOT / "kvtransfer")) for p in (ROOT / "kvtransfer" / "data").iterdir()}
    patterns = setuptools["package-data"]["kvtransfer"]
    assert "py.typed" in patterns
    assert inside
    assert all(any(Path(name).match(pattern) for pattern in patterns) for name in inside)


def test_version_is_said_once() -> None:
    assert project()["project"]["version"] == kvtransfer.__version__


def test_public_names_are_sorted_and_there() -> None:
    assert kvtransfer.__all__ == sorted(kvtransfer.__all__)
    assert len(set(kvtransfer.__all__)) == len(kvtransfer.__all__)
    for name in kvtransfer.__all__:
        assert getattr(kvtransfer, name) is not None
        assert name in dir(kvtransfer)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvtransfer.no_such_name


def test_names_for_the_type_checker_are_the_names_at_run_time() -> None:
    """`if TYPE_CHECKING:` imports and the lazy table say the same."""
    tree = ast.parse((ROOT / "kvtransfer" / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        (node.module, alias.name)
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(module, name) for module, names in kvtransfer._MODULES.items() for name in names}
    assert {name for _, name in seen} | {"__version__"} == set(kvtransfer.__all__)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing() -> None:
    out = run("import sys, kvtransfer; print([m for m in ('torch', 'numpy', 'triton', 'pynvml') if m in sys.modules])")
    assert out == "[]"


def test_import_of_every_module_touches_no_gpu() -> None:
    """CUDA is not initialised, no driver is loaded and no thread started by importing any of our modules."""
    names = [n for n, _ in modules() if n != "kvtransfer.__main__" and n not in OVER_TRANSFORMERS]
    out = run(
        "import importlib, sys, threading, torch\n"
        "sys.path.append('tests/stubs')\n"  # engines that are not installed
        "before = threading.active_count()\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "mapped = open('/proc/self/maps').read()\n"
        "print(torch.cuda.is_initialized(), 'libcuda.so' in mapped, threading.active_count() - before)"
    )
    assert out == "False False 0"


def test_readme_opens_with_purpose_and_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    purpose = readme.split("\n\n")[1].strip().split("\n")
    assert len(purpose) == 5
    cpu = readme.index("https://download.pytorch.org/whl/cpu")
    demo = readme.index("pip install -e '.[demo]' && kvtransfer demo")
    tests = readme.index("pip install -e '.[test]' && pytest")
    assert cpu < demo < tests


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")) and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert not broken
