"""The distribution: what an import brings in, who may import whom, what the wheel holds."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"fxquant": ROOT / "fxquant", "fxquant.passes": ROOT / "passes", "fxquant.kernels": ROOT / "kernels"}
HEAVY = ("transformers", "triton", "pydantic", "typer", "rich")


def _python(code: str) -> Any:
    """What a fresh interpreter prints, as JSON."""
    return json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))


def test_import_fxquant_is_light() -> None:
    code = f"import json, sys, fxquant; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    assert _python(code) == []


def test_the_main_road_needs_neither_transformers_nor_a_command_line() -> None:
    code = f"""
import json, sys, torch, fxquant
model = torch.nn.Sequential(torch.nn.Linear(128, 128))
fxquant.quantize_(model, "fp8_per_channel")
model(torch.ones(1, 128))
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    assert not {"transformers", "typer", "rich"} & set(_python(code))


def test_importing_everything_leaves_the_compilers_settings_alone() -> None:
    code = """
import json, torch, torch._dynamo, torch._inductor.config
def settings():
    return [torch._dynamo.config.save_config_portable(), torch._inductor.config.save_config_portable()]
before = settings()
import fxquant
for name in fxquant.__all__:
    getattr(fxquant, name)
import fxquant.backend
print(json.dumps(settings() == before))
"""
    assert _python(code) is True


def test_every_public_name_can_be_imported() -> None:
    code = "import json, fxquant; print(json.dumps([type(getattr(fxquant, name)).__name__ for name in fxquant.__all__]))"
    assert "module" not in _python(code)


def test_entry_points() -> None:
    (backend,) = [entry for entry in entry_points(group="torch_dynamo_backends") if entry.name == "fxquant"]
    (script,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "fxquant"]
    assert callable(backend.load())
    assert callable(script.load())


def _packages() -> dict[str, Path]:
    """Import path -> folder of every package in the tree."""
    return {
        ".".join([package, *init.parent.relative_to(folder).parts]): init.parent
        for package, folder in PACKAGES.items()
        for init in folder.rglob("__init__.py")
    }


def test_every_package_is_listed() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    folders = {name: str(folder.relative_to(ROOT)) for name, folder in _packages().items()}
    assert set(setuptools["packages"]) == set(folders)
    assert setuptools["package-dir"] == folders


def _imports(module: str, file: Path) -> Iterator[str]:
    """Absolute names of everything that a module's source imports, wherever in the file."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            start = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [start, node.module]))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in _packages().items():
        for file in sorted(folder.glob("*.py")):
            yield package if file.name == "__init__.py" else f"{package}.{file.stem}", file


def _layer(name: str) -> int | None:
    """0 for the kernels, 1 for the passes, 2 for what a user touches; None for other packages."""
    parts = [*name.split("."), ""]
    if parts[0] != "fxquant":
        return None
    return {"kernels": 0, "passes": 1}.get(parts[1], 2)


def test_imports_go_one_way() -> None:
    seen = 0
    for module, file in _modules():
        own = _layer(module)
        assert own is not None
        for name in _imports(module, file):
            other = _layer(name)
            seen += other is not None
            assert other is None or other <= own, f"{module} imports {name}"
    assert seen > 20


@pytest.mark.parametrize(
    ("package", "owners"),
    [
        ("pydantic", {"fxquant.config"}),
        ("typer", {"fxquant.cli"}),
        ("rich", {"fxquant.markdown"}),
        ("triton", {"fxquant.kernels"}),
    ],
)
def test_who_imports_a_package(package: str, owners: set[str]) -> None:
    for module, file in _modules():
        if any(name.split(".")[0] == package for name in _imports(module, file)):
            assert any(module == owner or module.startswith(f"{owner}.") for owner in owners), f"{module} imports {package}"


def test_constraints_pin_what_the_extras_name() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert list(pins) == sorted(pins, key=str.lower)
    assert pins["torch"] == "2.13.0"
    assert "triton" not in pins
    assert all(version[0].isdigit() and "+" not in version for version in pins.values())
    requirements = [
        *PROJECT["project"]["dependencies"],
        *(r for rs in PROJECT["project"]["optional-dependencies"].values() for r in rs),
    ]
    names = {requirement.split(";")[0].split(">=")[0].split("[")[0] for requirement in requirements}
    assert names - {"fxquant", "triton"} <= set(pins)


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES.values():
        shutil.copytree(folder, source / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("fxquant-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    modules = {
        f"{package.replace('.', '/')}/{file.name}" for package, folder in _packages().items() for file in folder.glob("*.py")
    }
    data = {f"fxquant/data/{file.name}" for file in (ROOT / "fxquant" / "data").iterdir()}
    assert held == modules | data | {"fxquant/py.typed"}
    assert "License-Expression: Apache-2.0" in metadata
    assert "License-File: LICENSE" in metadata
