"""The signature table: SGLang as installed passes, a changed one is refused with versions and the mismatch."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import metadata

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
