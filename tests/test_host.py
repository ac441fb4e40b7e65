"""The signature table: SGLang as installed passes, a changed one is refused with versions and the mismatch."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from sgl_peagle import host
from sgl_peagle.errors import PEagleError


def test_the_installed_sglang_is_as_expected() -> None:
    assert host.host_mismatches() == ()
    host.check_host()


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [
        (host.HostSymbol("plugins", "load_plugins", ("gone",)), "expected load_plugins(gone), found load_plugins()"),
        (host.HostSymbol("plugins", "unload_plugins"), "found nothing of that name"),
        (host.HostSymbol("no_such_module", "x"), "module not found"),
        (host.HostSymbol("managers.overlap_utils", "RelayPayload", ("gone",)), "bonus_tokens"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_changed_symbol_is_refused(symbol: host.HostSymbol, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HOST_SYMBOLS", (*host.HOST_SYMBOLS, symbol))
    host.host_mismatches.cache_clear()
    try:
        with pytest.raises(PEagleError) as error:
            host.check_host()
    finally:
        host.host_mismatches.cache_clear()
    assert expected in error.value.why
    assert metadata.version("sglang") in error.value.what and "pip install sglang==" in error.value.fix


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "sglang_version", lambda: "0.6.0")
    with pytest.raises(PEagleError, match="0.6.0"):
        host.check_host()


def _imported(file: Path) -> set[tuple[str, str]]:
    """(module below ``sglang.srt``, name) of everything that a file imports from SGLang at run time."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("sglang.")]
    return {(n.module.removeprefix("sglang.srt."), alias.name) for n in imports for alias in n.names}  # type: ignore[union-attr]


def test_every_import_from_sglang_is_in_the_table() -> None:
    listed = {(symbol.module, symbol.name.split(".")[0]) for symbol in host.HOST_SYMBOLS}
    modules = {symbol.module for symbol in host.HOST_SYMBOLS}
    package = Path(host.__file__).parent
    used = {(file.name, *pair) for file in package.rglob("*.py") for pair in _imported(file)}
    assert len(used) > 60
    missing = [u for u in used if u[1:] not in listed and f"{u[1]}.{u[2]}" not in modules]
    assert not missing, f"imported, but in no line of host.HOST_SYMBOLS: {sorted(missing)}"


def test_the_check_imports_nothing_of_sglang() -> None:
    code = (
        "import sys; from sgl_peagle.host import host_mismatches; host_mismatches(); "
        "print([m for m in sys.modules if m.startswith('sglang.')])"
    )
    start = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    assert time.perf_counter() - start < 60


def test_the_entry_point_is_declared() -> None:
    (entry,) = metadata.entry_points(group="sglang.srt.plugins", name="sgl_peagle")
    from sgl_peagle.plugin import activate

    assert entry.load() is activate
