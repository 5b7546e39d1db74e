"""Forward, dgrad and wgrad of every kernel, real and emulated, against FP64.

On a CPU `torch._scaled_mm` is a reference kernel: real adapters run there too, only slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from loka_compile.lowering.recipes import Granularity
from loka_compile.lowering.recipes import Operand

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


def why_no_real(kernel: str, device: torch.device) -> str | None:
    """Why the real kernel cannot run on `device`; on a CPU torch has reference kernels for some."""
    library, recipe, emulated = split_kernel_name(kernel)
    if emulated:
        return None
    if library.name == "torchao" and not library.version():
        return "torchao is not installed"
    if device.type == "cuda":
        return library.why_no_recipe(recipe, device)
    if library.name not in ("torch", "torchao") or recipe == "blockwise":
        return f"{kernel} has no CPU kernel"
    return None


@pytest.fixture(autouse=True)
def _can_run(request: pytest.FixtureRequest) -> Iterator[None]:
    names = request.fixturenames
    device = request.getfixturevalue("device") if "device" in names else torch.device("cpu")
    if device.type == "cuda":
        why = _compat.why_no_fp8(device)
        if why is not None:
            pytest.skip(why)
    if "kernel" in names:
        why = why_no_real(request.getfixturevalue("kernel"), device)
        if why is not None:
            pytest.skip(why)
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
    runs: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "real": lambda u, v: library.gemm(qa, u, qb, v, rule, torch.bfloat16),
        "emulated": lambda u, v: library.emulated_gemm(ea, u, eb, v, rule, torch.bfloat16),
    }
    for label, run in runs.items():
        once = run(sa, sb)
        torch.testing.assert_close(run(sa * 2, sb), once * 2, rtol=0, atol=0, msg=label)
        torch.testing.assert_close(run(sa, sb * 4), once * 4, rtol=0, atol=0, msg=label)
        if rule.a.isolates_rows:
            one = sa.clone()
            one[3] *= 2
            moved = run(one, sb) != once
            assert moved[3].any() and not moved[[0, 1, 2, *range(4, 16)]].any(), label
        if rule.b.isolates_rows:
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
    if not library.recipes[recipe].fwd.a.isolates_rows:
        pytest.skip("rows share a scale: a NaN reaches them all")
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


def spread(rows: int, columns: int, device: torch.device) -> Tensor:
    """Rows, and groups of 128 along both sides, of very different size: a scale in the wrong place
    then spoils the result."""
    down = torch.exp2((torch.arange(rows) * 7 % 9 - 4).float()).unsqueeze(1)
    across = torch.exp2((torch.arange(columns) // 128 * 5 % 7 - 3).float())
    return (torch.randn(rows, columns) * down * across).to(device)


# K, N, M: several blocks and a ragged one, no two counts alike; K = 712 and N = 200 are padded.
SHAPES = [(40, 272, 400), (130, 712, 200), (3, 144, 304)]


@KERNELS
@DIRECTION
@pytest.mark.parametrize("m_k_n", SHAPES, ids=str)
def test_several_blocks_and_ragged_sizes(kernel, direction, m_k_n, device):
    if device.type == "cpu" and not kernel.endswith(EMULATED):
        pytest.skip("the CPU's reference kernels are too slow here")
    m, k, n = m_k_n
    x, w, gy = spread(m, k, device), spread(n, k, device), spread(m, n, device)
    a, b = {"fwd": (x, w), "dgrad": (gy, w), "wgrad": (gy, x)}[direction]
    got = FUNCTIONS[direction](a.bfloat16(), b.bfloat16(), kernel)
    want = exact(direction, a.bfloat16(), b.bfloat16())
    assert got.shape == want.shape and got.is_contiguous()
    assert relative(got, want) < tolerance(kernel, direction)


@pytest.mark.parametrize("kernel", kernel_names())
@pytest.mark.parametrize(("k", "n"), [(40, 32), (48, 15), (15, 62)])
@DIRECTION
def test_widths_off_16_are_padded_inside(kernel, direction, k, n, device):
    """The same bits as when the caller adds the zero columns himself."""
    m = 17
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    gy = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    pad = torch.nn.functional.pad
    wide = pad(x, (0, -k % 16)), pad(w, (0, -k % 16, 0, -n % 16)), pad(gy, (0, -n % 16))
    pick = {"fwd": (0, 1), "dgrad": (2, 1), "wgrad": (2, 0)}[direction]
    got = FUNCTIONS[direction](*((x, w, gy)[i] for i in pick), kernel)
    want = FUNCTIONS[direction](*(wide[i] for i in pick), kernel)
    rows, columns = {"fwd": (m, n), "dgrad": (m, k), "wgrad": (n, k)}[direction]
    assert got.shape == (rows, columns) and got.is_contiguous()
    torch.testing.assert_close(got, want[:rows, :columns], rtol=0, atol=0)


@KERNELS
def test_an_input_quantised_beforehand(kernel, device):
    """FP8 values and a scale that is no power of two, as a producer with a static scale hands over:
    no other scale is taken, and the weight is quantised as the recipe says."""
    x8 = (torch.randn(17, K, device=device) * 8).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.3, device=device)
    w = (torch.randn(N, K, device=device) / K**0.5).bfloat16()
    x = torch.full((17, K), float("nan"), dtype=torch.bfloat16, device=device)
    got = gemm.forward(x, w, kernel, torch.bfloat16, ready=((x8, scale), None))
    want = (x8.double() * 0.3) @ w.double().t()
    assert got.dtype == torch.bfloat16
    assert relative(got, want) < tolerance(kernel, "fwd")
    twice = gemm.forward(x, w, kernel, torch.bfloat16, ready=((x8, scale * 2), None))
    torch.testing.assert_close(twice, got * 2, rtol=2**-7, atol=0)


def test_a_static_operand_is_scaled_by_its_bound_alone():
    library = LIBRARIES["torch"]
    rule = Operand(Granularity.STATIC)
    t = torch.tensor([[1.0, -2.0, 1000.0]])
    q, scale = library.quantize("rowwise", t, rule, torch.tensor(448.0))
    assert scale.shape == () and scale == 1.0
    assert q.float().tolist() == [[1.0, -2.0, 448.0]]
    fake, _ = library.fake_quantize("rowwise", t, rule, torch.tensor(448.0))
    assert torch.equal(fake, q.float())
    with pytest.raises(ValueError, match="bound known beforehand"):
        library.quantize("rowwise", t, rule)
