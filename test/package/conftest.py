import contextlib
import importlib.util

import pytest

from harness import ROOT

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401  (before a test imports pip, after which it cannot be imported)


@pytest.fixture
def setup_py(monkeypatch):
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("setup_under_test", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("TORCHCOMMS_PG_NCCL_INCLUDE", raising=False)
    return module
