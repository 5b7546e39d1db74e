"""Forward, dgrad and wgrad of every kernel, real and emulated, against FP64.

On a CPU `torch._scaled_mm` is a reference kernel: real adapters run there too, only slowly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from loka_compile import _compat
from loka_compile.lowering import gemm
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import E5M2
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION

# Norm of the error over norm of the result. RMS rounding error of one operand is about 2.6 % in
# e4m3 and 5.3 % in e5m2; two operands add in quadrature: 3.7 % and 5.9 %. The rest is room for few
# rows. A result of a kernel that runs in bf16 adds 0.2 %.
TOLERANCE = {"e4m3": 0.05, "e5m2": 0.09, "bf16": 0.005}
FUNCTIONS = {"fwd": gemm.forward, "dgrad": gemm.dgrad, "wgrad": gemm.wgrad}
ALL = [name + suffix for name in kernel_names() for suffix in ("", EMULATED)]
KERNELS = pytest.mark.parametrize("kernel", ALL)
DIRECTION = pytest.mark.parametrize("direction", DIRECTIONS)
# K = 48 and N = 64: multiples of 16 that differ, so that a swapped operand cannot pass.
K, N = 48, 64


@pytest.fixture(autouse=True)
def _can_run(request: pytest.FixtureRequest) -> Iterator[None]:
    names = request.fixturenames
    if "device" in names and request.getfixturevalue("device").type == "cuda":
        why = _compat.why_no_fp8(torch.device("cuda"))
        if why is not None:
            pytest.skip(why)
    kernel = request.getfixturevalue("kernel") if "kernel" in names else ""
    if kernel.startswith("torchao:") and not LIBRARIES["torchao"].version():
        pytest.skip("torchao is not installed")
    yield


def operands(direction: str, m: int, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor]:
    """The two arguments of the direction's function."""
    x = torch.randn(m, K, device=device).to(dtype)
    w = (torch.randn(N, K, device=device) / K**0.5).to(dtype)
    gy = torch.randn(m, N, device=device).to(dtype)
    return {"fwd": (x, w), "dgrad": (gy, w), "wgrad": (gy, x)}[direction]


def exact(direction: str, a: Tensor, b: Tensor) -> Tensor:
    return plain(direction, a.double(), b.double())


def plain(direction: str, a: Tensor, b: Tensor) -> Tensor:
    if direction == "dgrad":
        return a @ b
    return a @ b.t() if direction == "fwd" else a.t() @ b


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def tolerance(kernel: str, direction: str) -> float:
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None:
        return TOLERANCE["bf16"]
    return TOLERANCE["e5m2" if E5M2 in (rule.a.dtype, rule.b.dtype) else "e4m3"]


@KERNELS
@DIRECTION
@pytest.mark.parametrize("m", [0, 1, 7, 17, 33])
def test_result_within_recipe_tolerance(kernel, direction, m, device):
    a, b = operands(direction, m, torch.bfloat16, device)
    got = FUNCTIONS[direction](a, b, kernel)
    want = exact(direction, a, b)
    assert got.shape == want.shape and got.dtype == torch.bfloat16 and got.is_contiguous()
    if m == 0:
        assert (got == 0).all()
        return
    # One row has few products for errors to average over.
    room = 2 if m == 1 else 1
    assert relative(got, want) < room * tolerance(kernel, direction)


@KERNELS
@DIRECTION
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_every_dtype(kernel, direction, dtype, device):
    a, b = operands(direction, 17, dtype, device)
    got = FUNCTIONS[direction](a, b, kernel)
    assert got.dtype == dtype
    assert relative(got, exact(direction, a, b)) < tolerance(kernel, direction)


@DIRECTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_high_precision_is_the_plain_product(direction, dtype, device):
    a, b = operands(direction, 7, dtype, device)
    got = FUNCTIONS[direction](a, b, HIGH_PRECISION)
    torch.testing.assert_close(got, plain(direction, a, b), rtol=0, atol=0)


@KERNELS
@DIRECTION
def test_strides_do_not_matter(kernel, direction, device):
    a, b = operands(direction, 17, torch.bfloat16, device)
    want = FUNCTIONS[direction](a, b, kernel)

    def spaced(t: Tensor) -> Tensor:
        return t.repeat_interleave(2, dim=1)[:, ::2]

    def turned(t: Tensor) -> Tensor:
        return t.t().contiguous().t()

    for change in (spaced, turned):
        got = FUNCTIONS[direction](change(a), change(b), kernel)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@KERNELS
@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_stride_zero_gradient(kernel, direction, device):
    """`y.sum().backward()` sends one element, expanded."""
    _, b = operands(direction, 17, torch.bfloat16, device)
    one = torch.ones((), dtype=torch.bfloat16, device=device).expand(17, N)
    got = FUNCTIONS[direction](one, b, kernel)
    want = FUNCTIONS[direction](one.contiguous(), b, kernel)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("kernel", kernel_names())
@DIRECTION
def test_each_scale_matters(kernel, direction, device):
    """pytorch 190979: a scale argument that is ignored leaves the result as it was."""
    library, recipe, _ = split_kernel_name(kernel)
    rule = library.recipes[recipe].gemm(direction)
    if rule is None:
        pytest.skip("this direction stays in high precision")
    a = torch.randn(16, 32, device=device)
    b = torch.randn(48, 32, device=device)
    qa, sa = library.quantize(recipe, a, rule.a)
    qb, sb = library.quantize(recipe, b, rule.b)
    ea, eb = qa.float(), qb.float()
    runs = {
        "real": lambda u, v: library.gemm(qa, u, qb, v, rule, torch.bfloat16),
        "emulated": lambda u, v: library.emulated_gemm(ea, u, eb, v, rule, torch.bfloat16),
    }
    for label, run in runs.items():
        once = run(sa, sb)
        torch.testing.assert_close(run(sa * 2, sb), once * 2, rtol=0, atol=0, msg=label)
        torch.testing.assert_close(run(sa, sb * 4), once * 4, rtol=0, atol=0, msg=label)
        if rule.a.rows:
            one = sa.clone()
            one[3] *= 2
            moved = run(one, sb) != once
            assert moved[3].any() and not moved[[0, 1, 2, *range(4, 16)]].any(), label
        if rule.b.rows:
            one = sb.clone()
            one[5] *= 2
            moved = run(sa, one) != once
            assert moved[:, 5].any() and not moved[:, [*range(5), *range(6, 48)]].any(), label


@pytest.mark.parametrize("kernel", kernel_names())
@pytest.mark.parametrize("m", [1, 5, 17])
def test_padding_is_zero(kernel, m, device):
    """A padded batch: the same bits as when the caller adds the zero rows himself."""
    gy, x = operands("wgrad", m, torch.bfloat16, device)
    more = -m % 16
    want = gemm.wgrad(
        torch.nn.functional.pad(gy, (0, 0, 0, more)),
        torch.nn.functional.pad(x, (0, 0, 0, more)),
        kernel,
    )
    room = 0.0 if split_kernel_name(kernel)[0].recipes[kernel.split(":")[1]].wgrad else 2**-7
    before = torch.are_deterministic_algorithms_enabled()
    try:
        # Fills what is allocated without a value with NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        got = gemm.wgrad(gy, x, kernel)
    finally:
        torch.use_deterministic_algorithms(before)
    torch.testing.assert_close(got, want, rtol=room, atol=room)


@pytest.mark.parametrize("kernel", kernel_names())
@DIRECTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_and_emulated_agree(kernel, direction, dtype, device):
    """Same bytes in; what differs is the order of an FP32 sum (on Hopper also its width, about 14
    bits with fast accumulation) and one rounding of the result to bf16."""
    a, b = operands(direction, 33, dtype, device)
    real = FUNCTIONS[direction](a, b, kernel)
    emulated = FUNCTIONS[direction](a, b, kernel + EMULATED)
    step = 2.0**-7  # twice half a step of bf16 on either side
    near_zero = 1e-3 if device.type == "cuda" else 1e-5
    size = float(emulated.abs().max())
    torch.testing.assert_close(real, emulated, rtol=step, atol=near_zero * size)


@KERNELS
def test_a_nan_row_stays_in_its_row(kernel, device):
    library, recipe, _ = split_kernel_name(kernel)
    if not library.recipes[recipe].fwd.a.rows:
        pytest.skip("one scale for the tensor: a NaN reaches every row")
    x, w = operands("fwd", 5, torch.bfloat16, device)
    want = gemm.forward(x, w, kernel)
    for bad in (math.nan, math.inf):
        x[2, 7] = bad
        got = gemm.forward(x, w, kernel)
        assert not torch.isfinite(got[2]).any()
        others = [0, 1, 3, 4]
        torch.testing.assert_close(got[others], want[others], rtol=0, atol=0)


@KERNELS
@DIRECTION
def test_zero_rows_and_zero_tensors(kernel, direction, device):
    """ao 3356: a zero-initialised weight must not make a NaN, here or in a gradient."""
    a, b = operands(direction, 17, torch.bfloat16, device)
    a[3] = 0
    for left, right in ((a, b), (a, torch.zeros_like(b)), (torch.zeros_like(a), b)):
        got = FUNCTIONS[direction](left, right, kernel)
        assert torch.isfinite(got).all()
        if left is not a or right is not b:
            assert (got == 0).all()


@pytest.mark.parametrize("kernel", ["torch:tensorwise", "torchao:tensorwise"])
def test_a_recorded_maximum_coarsens_the_grid(kernel):
    """The `amax` argument is read: small values flush under a scale that covers a large one."""
    x, w = operands("fwd", 9)
    large = torch.tensor(1e6)
    own = gemm.forward(x, w, kernel + EMULATED)
    covered = gemm.forward(x, w, kernel + EMULATED, amax=(large, None))
    assert relative(covered, exact("fwd", x, w)) > 0.5 > relative(own, exact("fwd", x, w))
    small = gemm.forward(x, w, kernel + EMULATED, amax=(torch.tensor(1e-6), None))
    torch.testing.assert_close(small, own, rtol=0, atol=0)
