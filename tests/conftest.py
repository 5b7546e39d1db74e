"""Shared by all tests: devices, seeds, threads and a private Inductor cache.

Environment is set before torch is imported: Inductor reads it once.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
# Compile workers are processes of their own; under xdist they would multiply.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A cache per worker and per run: workers must not wait for each other's locks, and a result that an
# older source left behind must not answer for the present one.
_CACHE = None
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ or _WORKER:
    _CACHE = tempfile.mkdtemp(prefix=f"loka-tests-{_WORKER}-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Read when a kernel is decorated: before any of ours is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from loka_compile import _compat  # noqa: E402

if _WORKER:
    torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE is not None:
        shutil.rmtree(_CACHE, ignore_errors=True)


_NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.gpu` is enough: the reason to skip is added here."""
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(_NO_CUDA)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one."""
    return torch.device(request.param)


@pytest.fixture
def fp8_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU counts as FP8 hardware: its kernels are those of a GPU, without emulation."""
    real = _compat.why_no_fp8
    monkeypatch.setattr(_compat, "why_no_fp8", lambda d: None if d.type == "cpu" else real(d))


@pytest.fixture(autouse=True)
def _old_cpu_kernels(request: pytest.FixtureRequest) -> None:
    """Skip a case that needs a real row-scaled `_scaled_mm` on a CPU whose torch has none."""
    names = request.fixturenames
    kernel = request.getfixturevalue("kernel") if "kernel" in names else ""
    device = request.getfixturevalue("device") if "device" in names else torch.device("cpu")
    if isinstance(kernel, str) and "rowwise" in kernel and not kernel.endswith("+emulated"):
        why = _compat.why_no_scaled_mm_rowwise(torch.device(device))
        if why is not None:
            pytest.skip(why)


@pytest.fixture
def agrees():
    """Run a model through the backend and in eager; outputs and gradients must agree.

    fp8: after ten steps every GEMM runs row-scaled FP8 (emulated), heads and odd shapes included,
    and the tolerance is that of FP8.
    """
    from loka_compile import loka_backend

    def run(model, *inputs, fp8=False, steps=None, loss=None, options=None, **kwargs):
        torch._dynamo.reset()
        chosen = {"inner": "aot_eager", "mods": "off", **(options or {})}
        if fp8:
            chosen.update(emulate=True, force={"*": "torch:rowwise"})
        compiled = torch.compile(model, backend=loka_backend, options=chosen, **kwargs)
        loss = loss or (lambda y: (y.float().square() + y.float()).sum())
        parameters = dict(model.named_parameters())
        leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]

        def step(function):
            for leaf in (*parameters.values(), *leaves):
                leaf.grad = None
            y = function(*inputs)
            loss(y).backward()
            return y, {n: p.grad for n, p in parameters.items()}, [t.grad for t in leaves]

        for _ in range(steps or (10 if fp8 else 1)):
            y, gradients, of_inputs = step(compiled)
        want, want_gradients, want_inputs = step(model)
        pairs = [(y, want)] if isinstance(y, torch.Tensor) else list(zip(y, want, strict=True))
        assert all((a is None) == (b is None) for a, b in pairs)
        _close([p for p in pairs if p[0] is not None], fp8, 0.15)
        for name, gradient in want_gradients.items():
            assert (gradients[name] is None) == (gradient is None), name
        got = [(gradients[n], g) for n, g in want_gradients.items() if g is not None]
        _close([*got, *zip(of_inputs, want_inputs, strict=True)], fp8, 0.3)
        return compiled

    return run


def _close(pairs, fp8: bool, allowed: float) -> None:
    for got, want in pairs:
        assert got.shape == want.shape and got.dtype == want.dtype
        limit = allowed if fp8 else 100 * torch.finfo(got.dtype).eps
        assert torch.isfinite(got).all()
        error = (got.double() - want.double()).norm()
        assert error <= limit * want.double().norm(), (error, want.norm())


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
