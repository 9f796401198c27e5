"""The rules of the house, read off the source: imports keep their direction, names are what they say, tests assert."""

import ast
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import heedful

SOURCE = Path(heedful.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# room -> rooms of heedful it may import from (itself always); rooms not built yet are listed all the same.
DATA_ROOMS = {"geometry", "series", "events", "tables", "ranking", "multimodal", "corpus"}
GROUND = {
    "_checks", "_errors", "_files", "_installed", "_lazy", "_plot", "_progress", "_result", "_runtime", "_savable", "_settings", "_tasks", "_text", "__init__",
}  # fmt: skip
ALLOWED = {
    **dict.fromkeys(GROUND, GROUND),
    # for type checkers
    "__init__": {
        "bridges",
        "convert",
        "decomposition",
        "kernels",
        "lens",
        "masks",
        "nn",
        "ops",
        "_attend",
        "_errors",
        "_lazy",
        "discovery",
        "report",
        "transport",
        *DATA_ROOMS,
    },
    # pictures of graphs
    "discovery": GROUND | {"report"},
    "report": GROUND,
    "transport": GROUND | {"ops"},
    "kernels": GROUND,
    "masks": GROUND,
    "ops": GROUND | {"kernels", "masks"},
    "_attend": GROUND | {"kernels", "masks", "ops"},
    "nn": GROUND | {"kernels", "masks", "ops", "_attend"},
    "bridges": GROUND | {"kernels", "masks", "ops", "_attend", "nn"},
    **{
        room: GROUND | {"kernels", "masks", "ops", "_attend", "nn", "bridges", "transport", "decomposition"}
        for room in DATA_ROOMS
    },
    "lens": GROUND | {"kernels", "masks", "ops", "_attend", "nn", "bridges", "discovery", "transport", "report"},
    "decomposition": GROUND | {"kernels", "ops", "bridges"},
    # what attention computes is observed before it is replaced
    "convert": GROUND | {"nn", "bridges", "lens"},
    "__main__": {"cli"},
    "cli": GROUND
    | {"kernels", "masks", "ops", "_attend", "nn", "bridges", "lens", "discovery", "convert", "report", *DATA_ROOMS},
    "web": GROUND | {"kernels", "masks", "ops", "_attend", "nn", "bridges", "lens", "cli", *DATA_ROOMS},
}
CORE = {"kernels", "masks", "ops", "_attend", "nn", "_errors", "_savable"}
CORE_PACKAGES = {"torch", "numpy", *sys.stdlib_module_names}
FUSED = SOURCE / "ops" / "fused"  # its kernels alone name triton at module level


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def room_of_name(name: str) -> str:
    """The room that `heedful.x.y` or a name of the package itself lives in."""
    parts = name.split(".")
    if len(parts) == 1:
        return "__init__"
    return (heedful._HOMES.get(parts[1]) or f"heedful.{parts[1]}").split(".")[1]


@dataclass(frozen=True)
class Read:
    """What rules ask of a file: modules it imports, those at module level, names of other packages' private parts, names, and texts other than docstrings."""

    imports: list[str]
    outside: list[str]
    private: list[tuple[str, str]]
    names: set[str]
    texts: list[str]


@cache
def read(path: Path) -> Read:
    """A file, read once: those under TYPE_CHECKING count as module level."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    inside = {
        id(node)
        for outer in nodes
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(outer)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    importing = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any(getattr(node, "level", 0) for node in importing), f"{path}: relative import"
    docs = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return Read(
        [name for node in importing for name in modules(node)],
        [name for node in importing if id(node) not in inside for name in modules(node)],
        [name for node in importing for name in private_names(node)],
        names,
        [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs],
    )


def modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that an import names; of `heedful` the names themselves."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"heedful.{alias.name}" for alias in node.names] if node.module == "heedful" else [node.module]


def private_names(node: ast.Import | ast.ImportFrom):
    """(package, name) of what is imported through a leading underscore of a package other than the root."""
    above = node.module.split(".") if isinstance(node, ast.ImportFrom) else []
    for alias in node.names:
        parts = [*above, *([alias.name] if above else alias.name.split("."))]
        if parts[0] == "heedful" and any(part.startswith("_") for part in parts[2:]):
            yield parts[1], alias.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_keep_their_direction(path):
    here = room(path)
    assert here in ALLOWED, f"a room that the house does not know: {here}"
    for name in read(path).imports:
        if name.split(".")[0] == "heedful":
            there = "__init__" if name == "heedful.__version__" else room_of_name(name)
            assert there == here or there in ALLOWED[here], f"{path} imports {name}"


@pytest.mark.parametrize("path", [f for f in FILES if room(f) in CORE], ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_core_needs_torch_and_numpy_alone(path):
    allowed = CORE_PACKAGES | ({"triton"} if path.parent == FUSED else set())
    for name in read(path).outside:
        package = name.split(".")[0]
        assert package == "heedful" or package in allowed, f"{path} imports {name} at module level"


def test_lightning_is_named_in_one_place():
    names = ("lightning", "pytorch_lightning", "lightning_fabric")
    naming = {path for path in FILES if any(name.split(".")[0] in names for name in read(path).imports)}
    assert naming == {SOURCE / "bridges" / "training.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_room_uses_what_is_private_to_another(path):
    """A leading underscore is a closed door; the root's small parts are everybody's."""
    foreign = [(home, name) for home, name in read(path).private if home not in {room(path), *GROUND}]
    assert foreign == []


TAG = re.compile(
    r"</?(a|b|code|div|em|figure|h[1-6]|html|i|li|p|pre|script|section|span|style|svg|t[drh]|table|ul)[\s>]"
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_each_job_has_one_place(path):
    """Pages and pictures are made in `report`, calls of modules caught in `_runtime` and bridges, classes listed in `_savable`."""
    here, names, texts = room(path), read(path).names, read(path).texts
    if here != "report":
        assert [text for text in texts if TAG.search(text)] == []
        assert "html" not in read(path).imports, "escapes HTML by itself"
        assert here == "_plot" or not any(name.split(".")[0] == "matplotlib" for name in read(path).imports)
    if here not in ("bridges", "_runtime"):
        assert not {name for name in names if re.fullmatch(r"register_\w*(forward|backward)\w*hook", name)}
    # A kernel becomes a dataclass by being defined; what lists it is `Savable`.
    if path not in (SOURCE / "_savable.py", SOURCE / "kernels" / "base.py"):
        assert "__init_subclass__" not in names


def test_matplotlib_is_asked_for_in_one_place():
    """Whatever draws asks `_plot.axes` first, which says how to get matplotlib where it is missing."""
    drawing = [
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("plot")
    ]
    assert len(drawing) > 15
    for path, function in drawing:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        asked = [node.lineno for node in calls if ast.unparse(node.func) in ("axes", "heat_map")]
        handed_on = [node.lineno for node in calls if ast.unparse(node.func).endswith(".plot")]
        named = [
            node.lineno
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom) and "matplotlib" in ast.unparse(node)
        ]
        assert asked or handed_on, f"{path}: {function.name} draws on axes of its own"
        assert min([*asked, *handed_on]) < min(named, default=10**6), f"{path}: {function.name}"
    assert {room(path) for path in FILES if "import pyplot" in path.read_text()} <= {"_plot", "cli"}


def test_triton_is_named_by_fused_kernels_alone():
    naming = {path for path in FILES if any(name.split(".")[0] == "triton" for name in read(path).outside)}
    assert naming
    assert {path.parent for path in naming} == {FUSED}
    for path in (FUSED / name for name in ("__init__.py", "_device.py", "operators.py")):
        assert path not in naming, "read before anybody asks for a fused kernel"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_file_is_long(path):
    assert len(path.read_text().splitlines()) <= 500


MODULES = [
    "heedful",
    *(m.name for m in pkgutil.walk_packages(heedful.__path__, "heedful.") if not m.name.endswith("__main__")),
]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_what_imports(name):
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), f"{name}.__all__ lists {public}"
    if module.__file__.endswith("__init__.py") and name != "heedful.ops.fused":
        assert module.__all__


def test_the_package_lists_what_it_has():
    assert set(heedful.__all__) == set(heedful._HOMES)
    assert heedful.__all__ == sorted(heedful.__all__)
    assert set(heedful.__all__) <= set(dir(heedful))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        heedful.nothing  # noqa: B018


def test_docs_list_every_public_name():
    """docs/reference.md is what `make docs` writes from `__all__` and the docstrings."""
    spec = importlib.util.spec_from_file_location("build", TESTS.parent / "docs" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    text = (TESTS.parent / "docs" / "reference.md").read_text()
    assert text == build.reference(), "run `make docs` and commit docs/reference.md"
    for name in heedful.__all__:
        assert f"`{name}`" in text


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them by their names alone."""
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_public_things_have_docstrings():
    rooms = (
        "kernels",
        "nn",
        "masks",
        "corpus",
        "events",
        "geometry",
        "multimodal",
        "series",
        "tables",
        "ranking",
        "lens",
        "lens.symmetry",
        "lens.depth",
        "lens.transport",
    )
    bridges = (
        "bridges.estimator",
        "bridges.predictors",
        "bridges.record",
        "bridges.samples",
        "bridges.sentences",
        "bridges.training",
        "bridges.transformers",
        "bridges.watch",
    )
    for module in (f"heedful.{room}" for room in (*rooms, *bridges)):
        home = importlib.import_module(module)
        for name in home.__all__:
            thing = getattr(home, name)
            if callable(thing) or isinstance(thing, type):
                assert thing.__doc__, f"{module}.{name} has no docstring"
                assert not thing.__doc__.startswith(f"{name}("), f"{module}.{name} has a generated docstring"


def asserts(function: ast.FunctionDef) -> bool:
    """Whether a test can fail: an assert, pytest.raises, or a torch / project checker that raises."""
    checkers = {"raises", "assert_close", "assert_allclose", "opcheck", "warns"}
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in checkers or called.startswith(("assert_", "_assert", "check_", "_check")):
                return True
    return False


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda p: p.name)
def test_every_test_asserts(path):
    tests = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert tests
    assert [test.name for test in tests if not asserts(test)] == []


def test_skips_have_reasons():
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "skip" in node.func.attr:
                assert node.args or any(k.arg == "reason" for k in node.keywords), f"{path.name}: a skip without reason"


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after running the code."""
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(out.stdout.split())


def test_nothing_heavy_is_imported_before_it_is_needed():
    light = loaded_by("import heedful, heedful.cli")
    assert "heedful.cli" in light
    assert "heedful.bridges.transformers" in loaded_by("import heedful; heedful.bridges.transformers.use")
    heavy = {"torch", "numpy", "transformers", "matplotlib", "sklearn", "pandas", "safetensors", "pytorch_lightning"}
    assert not light & heavy
    core = loaded_by("import torch; before = set(__import__('sys').modules); from heedful import attend, nn, masks")
    assert {"torch", "heedful.nn", "heedful._attend"} <= core
    assert not core & {"transformers", "matplotlib", "sklearn", "pandas", "safetensors", "triton", "typer", "rich"}


def test_triton_waits_until_a_fused_kernel_runs():
    """Triton exists for Linux alone and takes a second to import; whoever stays on the CPU never meets it."""
    call = "import heedful, heedful.ops, heedful.nn, torch; x = torch.randn(1, 2, 5, 4)"
    for kernel in ("Softmax()", "Sigmoid()", "FeatureMap()"):
        loaded = loaded_by(f"{call}; heedful.attend(x, x, x, is_causal=True, kernel=heedful.{kernel})")
        assert "heedful.ops.fused" in loaded
        assert "triton" not in loaded
