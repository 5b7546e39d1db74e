"""First use of a kernel: what passes, what is caught, and that a child's end is only a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loka_compile.lowering import chain
from loka_compile.lowering import first_use
from loka_compile.lowering import first_use_child
from loka_compile.lowering import first_use_memory
from loka_compile.lowering.libraries import LIBRARIES
from loka_compile.lowering.libraries import kernel_names
from loka_compile.lowering.libraries import split_kernel_name
from loka_compile.lowering.libraries.base import GemmShape
from loka_compile.lowering.libraries.own import Own
from loka_compile.lowering.libraries.torch_scaled_mm import TorchScaledMM
from loka_compile.lowering.recipes import DIRECTIONS
from loka_compile.lowering.recipes import EMULATED
from loka_compile.lowering.recipes import HIGH_PRECISION

CPU = torch.device("cpu")
BF16 = torch.bfloat16
# Tails in every dimension; small, for the reference kernel that torch has on a CPU.
ODD = GemmShape(17, 144, 40)
WHOLE = GemmShape(64, 128, 128)
ALL_EMULATED = [name + EMULATED for name in kernel_names() if not name.startswith("loka:")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("LOKA_CACHE", str(tmp_path / "cache"))
    first_use.forget()
    yield
    first_use.forget()


@pytest.fixture
def on_cpu(monkeypatch):
    """Let real kernels be tried on this CPU."""
    monkeypatch.setattr(TorchScaledMM, "why_no_recipe", lambda self, recipe, device: None)


@pytest.mark.parametrize("kernel", ALL_EMULATED)
def test_right_kernels_pass(kernel):
    library, recipe, _ = split_kernel_name(kernel)
    for direction in DIRECTIONS:
        if library.recipes[recipe].gemm(direction) is not None:
            args = (kernel, direction, ODD, torch.float32, "cpu")
            assert first_use.run_and_compare(*args) is None


def test_a_real_kernel_passes():
    for direction in DIRECTIONS:
        assert first_use.run_and_compare("torch:tensorwise", direction, ODD, BF16, "cpu") is None


EPILOGUES = [
    "block_norm:48:hard_swish+gain",
    "block_norm:48:none+gate",
    "block_norm:48:hard_swish+gain+add",
    "pointwise:relu+bias",
    "pointwise:silu+bias+mul+add",
    "pointwise:none+scale",
]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("kernel", ["loka:tensorwise", "loka:rowwise"])
def test_what_our_own_kernel_runs_is_the_whole_chain(kernel, epilogue):
    shape = GemmShape(17, 144, 48, epilogue)
    assert first_use.run_and_compare(kernel, "fwd", shape, BF16, "cpu") is None


@pytest.mark.parametrize("epilogue", ["block_norm:48:none+gain", "pointwise:gelu+bias+mul"])
def test_a_chain_that_is_wrong_is_found(epilogue, monkeypatch):
    real = Own.quantize

    def quantize(self, recipe, t, rule, amax=None):
        q, scale = real(self, recipe, t, rule, amax)
        return q, scale.roll(1, 0)

    monkeypatch.setattr(Own, "quantize", quantize)
    shape = GemmShape(17, 144, 48, epilogue)

    def emulated(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Own, "quantize", real)
            return args[0](*args[1:])

    plain = first_use.call_of("loka:rowwise", "fwd", shape)
    monkeypatch.setattr(
        first_use,
        "call_of",
        lambda *_: (
            lambda a, b, k: emulated(plain, a, b, k) if k.endswith(EMULATED) else plain(a, b, k)
        ),
    )
    why = first_use.run_and_compare("loka:rowwise", "fwd", shape, BF16, "cpu")
    assert why is not None and "differs" in why


def test_reasons_known_beforehand_need_no_run(monkeypatch):
    monkeypatch.setattr(first_use, "run_and_compare", None)
    assert first_use.why_failed(HIGH_PRECISION, "fwd", ODD, BF16, CPU) is None
    assert "no FP8 hardware" in first_use.why_failed("torch:rowwise", "fwd", ODD, BF16, CPU)
    why = first_use.why_failed("torchao:rowwise_with_gw_hp", "wgrad", ODD, BF16, CPU)
    assert "keeps wgrad" in why


def _broken(monkeypatch, change):
    real = TorchScaledMM.call

    def call(self, a, sa, b, sb, rule, dtype):
        return change(lambda u, v: real(self, a, u, b, v, rule, dtype), sa, sb)

    monkeypatch.setattr(TorchScaledMM, "call", call)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run, u, v: run(u.roll(1, 0), v), "differs from the dequantised product"),
        (lambda run, u, v: run(u, torch.ones_like(v)), "differs from the dequantised product"),
        (lambda run, u, v: run(u, v).fill_(float("nan")), "non-finite"),
        (lambda run, u, v: run(u, v)[:-1], "shape"),
        (lambda run, u, v: [][0], "first use failed: IndexError"),
    ],
    ids=["rolled scale", "ignored scale", "nan", "short", "raises"],
)
def test_what_is_wrong_is_said(change, says, monkeypatch):
    if sys.modules["torch"].__version__ < "2.13":
        pytest.skip("torch's CPU kernel takes row scales from 2.13 on")
    _broken(monkeypatch, change)
    why = first_use.run_and_compare("torch:rowwise", "fwd", WHOLE, BF16, "cpu")
    assert why is not None and says in why


def test_an_outcome_is_kept(on_cpu, monkeypatch):
    runs = []

    def run(*key):
        runs.append(key)
        return "no"

    monkeypatch.setattr(first_use, "run_and_compare", run)
    for _ in range(3):
        assert first_use.why_failed("torch:tensorwise", "fwd", WHOLE, BF16, CPU) == "no"
    assert len(runs) == 1


def test_odd_shapes():
    assert not first_use.is_odd(WHOLE)
    for shape in ((63, 128, 128), (72, 128, 128), (64, 160, 128), (64, 128, 512 + 16)):
        assert first_use.is_odd(GemmShape(*shape))


@pytest.mark.slow
def test_a_real_child_answers(on_cpu):
    """The child knows nothing of the patch above: it runs what it is given."""
    wanted = [("torch:tensorwise", d, ODD, BF16) for d in DIRECTIONS]
    assert first_use.check(wanted, CPU) == [None, None, None]


def _child(monkeypatch, tmp_path: Path, body: str) -> list[list[str]]:
    """Put a script in place of this module's child; the commands of all that were started."""
    script = tmp_path / "child.py"
    script.write_text("import sys, json, os, time\n(answered,) = sys.argv[1:]\n" + body)
    real, started = subprocess.Popen, []

    def popen(command, **kwargs):
        started.append(command)
        return real([sys.executable, str(script), command[-1]], **kwargs)

    monkeypatch.setattr(first_use_child.subprocess, "Popen", popen)
    return started


# Answers "fine" until it is asked about dgrad first, and then ends as BODY says.
ANSWER = """
for line in sys.stdin:
    for row in json.loads(line):
        if row[1] == "dgrad":
            {}
        with open(answered, "a") as out:
            out.write("null\\n")
"""
WANTED = [("torch:tensorwise", d, ODD, BF16) for d in DIRECTIONS]


def test_a_crash_costs_one_candidate(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(first_use, "run_and_compare", lambda *key: None)
    body = "sys.stderr.write('illegal memory access\\n'); sys.stderr.flush(); os._exit(134)"
    _child(monkeypatch, tmp_path, ANSWER.format(body))
    fwd, dgrad, wgrad = first_use.check(WANTED, CPU)
    assert fwd is None and wgrad is None
    assert "status 134" in dgrad and "illegal memory access" in dgrad


def test_a_hang_costs_one_candidate(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(first_use, "run_and_compare", lambda *key: None)
    monkeypatch.setattr(first_use_child, "LIMIT_SECONDS", 1.0)
    _child(monkeypatch, tmp_path, ANSWER.format("time.sleep(60)"))
    fwd, dgrad, wgrad = first_use.check(WANTED, CPU)
    assert fwd is None and wgrad is None and "did not return within 1 s" in dgrad


@pytest.mark.slow
def test_a_child_ends_with_its_parent():
    """Else one that hangs uses the device on after the training that started it was killed."""
    code = (
        "import time; from loka_compile.lowering import first_use_child as f; f._questions(print); "
        "print('up', flush=True); time.sleep(300)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"up\n" and child.poll() is None
    child.stdin.close()
    assert child.wait(timeout=30) == 1
    child.stdout.close()


def test_one_child_answers_one_question_after_the_other(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(first_use, "run_and_compare", lambda *key: None)
    started = _child(monkeypatch, tmp_path, ANSWER.format("os._exit(3)"))
    with first_use.one_child():
        assert first_use.check(WANTED[:1], CPU) == [None]
        assert first_use.check([WANTED[2]], CPU) == [None] and len(started) == 1
        # One that ended is followed by another.
        first_use.forget()
        assert "status 3" in str(first_use.check([WANTED[1]], CPU)[0])
        other = ("torch:rowwise", "fwd", ODD, BF16)
        assert first_use.check([other], CPU) == [None] and len(started) == 2
    first_use.check([("torch:rowwise", "wgrad", ODD, BF16)], CPU)
    assert len(started) == 3


def test_a_child_is_started_beforehand_for_shapes_that_nothing_is_known_of(
    on_cpu, monkeypatch, tmp_path
):
    monkeypatch.setattr(first_use, "run_and_compare", lambda *key: None)
    started = _child(monkeypatch, tmp_path, ANSWER.format("os._exit(3)"))
    with first_use.one_child():
        first_use.foresee([("torch:tensorwise", "fwd", WHOLE, BF16)], CPU)
        assert not started
        first_use.foresee(WANTED, CPU)
        assert len(started) == 1
        assert first_use.check(WANTED[:1], CPU) == [None] and len(started) == 1
    with first_use.one_child():
        first_use.foresee(WANTED, CPU)
        assert len(started) == 1


def test_a_lost_context_is_no_fault_of_the_next(on_cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(first_use, "run_and_compare", lambda *key: None)
    answer = """open(answered, "a").write(json.dumps("illegal access") + chr(10))"""
    lost = f"{answer}; os._exit({first_use_child.LOST})"
    started = _child(monkeypatch, tmp_path, ANSWER.format(lost))
    assert first_use.check(WANTED, CPU) == [None, "illegal access", None] and len(started) == 2


def test_no_child_at_all(on_cpu, monkeypatch):
    def popen(*args, **kwargs):
        raise PermissionError("no processes here")

    monkeypatch.setattr(first_use_child.subprocess, "Popen", popen)
    monkeypatch.setattr(first_use, "run_and_compare", None)
    why = first_use.why_failed("torch:tensorwise", "fwd", ODD, BF16, CPU)
    assert "no child process" in why and "no processes here" in why


def test_keys_survive_the_way_to_the_child():
    key = ("torch:rowwise", "dgrad", GemmShape(3, 5, 7, "none"), torch.float16, "cuda:1")
    assert first_use_child.decode(json.loads(json.dumps(first_use_child.encode(key)))) == key


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in kernel_names() if not k.startswith("loka:")])
def test_real_kernels_on_regular_shapes(kernel):
    device = torch.device("cuda")
    library, recipe, _ = split_kernel_name(kernel)
    why = library.why_no_recipe(recipe, device)
    if why is not None:
        pytest.skip(why)
    shape = GemmShape(512, 1024, 768)
    for direction in DIRECTIONS:
        if library.recipes[recipe].gemm(direction) is not None:
            assert first_use.why_failed(kernel, direction, shape, BF16, device) is None, direction


@pytest.mark.gpu
def test_odd_shapes_on_a_gpu_never_end_the_program():
    device = torch.device("cuda")
    wanted = []
    for library in LIBRARIES.values():
        for recipe, rules in library.recipes.items():
            for direction in DIRECTIONS:
                if rules.gemm(direction) is not None:
                    wanted.append((f"{library.name}:{recipe}", direction, ODD, BF16))
    reasons = first_use.check(wanted, device)
    for one, why in zip(wanted, reasons, strict=True):
        print(*one[:2], why or "passed")
    torch.ones(8, device=device).sum().item()
    of_torch = [w for one, w in zip(wanted, reasons, strict=True) if one[0] == "torch:tensorwise"]
    assert of_torch == [None, None, None]


def test_one_wrong_small_row_is_seen():
    want = torch.randn(8, 16) * torch.logspace(-6, 2, 8).unsqueeze(1)
    assert first_use.why_wrong(want * 1.01, want) is None
    wrong = want.clone()
    wrong[0] *= 2
    assert "differs" in str(first_use.why_wrong(wrong, want))


def test_a_width_that_cannot_run_is_not_tried():
    narrow = GemmShape(64, 128, 1)
    kernel = "torch:rowwise" + EMULATED
    assert "N = 1" in str(first_use.why_failed(kernel, "fwd", narrow, BF16, CPU))


def test_odd_shapes_alone_go_through_a_child_process(monkeypatch):
    """Emulated kernels too, so that the way itself is seen without a GPU."""
    asked = []
    real = first_use_child.Child.ask
    monkeypatch.setattr(
        first_use_child.Child, "ask", lambda self, keys: (asked.extend(keys), real(self, keys))[1]
    )
    kernel = "torch:rowwise" + EMULATED
    wanted = [(kernel, d, ODD, BF16) for d in ("fwd", "wgrad")]
    assert first_use.check([*wanted, (kernel, "fwd", WHOLE, BF16)], CPU) == [None] * 3
    assert [(k, d, s) for k, d, s, _, _ in asked] == [(k, d, s) for k, d, s, _ in wanted]


def test_an_outcome_is_remembered_by_the_next_process(on_cpu, monkeypatch):
    asked = ("torch:tensorwise", "fwd", WHOLE, BF16, CPU)
    other = ("torch:tensorwise", "dgrad", WHOLE, BF16, CPU)
    assert first_use.why_failed(*asked) is None
    monkeypatch.setattr(first_use, "run_and_compare", lambda *key: "first use failed: it")
    assert "it" in first_use.why_failed(*other)
    first_use.forget()
    monkeypatch.setattr(first_use, "run_and_compare", None)
    assert first_use.why_failed(*asked) is None and "it" in first_use.why_failed(*other)
    # Another version of the library is another kernel, another K another GEMM.
    first_use.forget()
    with pytest.raises(TypeError):
        first_use.why_failed(*asked[:2], GemmShape(64, 256, 128), BF16, CPU)
    monkeypatch.setattr(first_use_memory, "version_of", lambda *of: "next")
    with pytest.raises(TypeError):
        first_use.why_failed(*asked)


def test_what_is_of_the_moment_or_cannot_be_read_is_not_remembered(on_cpu, monkeypatch):
    key = ("torch:tensorwise", "fwd", WHOLE, BF16, "cpu")

    def full(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(first_use, "operands", full)
        assert "out of memory" in first_use.why_failed(*key[:4], CPU)
    assert first_use_memory.recall(key) is None
    first_use.forget()
    assert first_use.why_failed(*key[:4], CPU) is None and first_use_memory.recall(key) == (None,)
    (file,) = first_use_memory.folder().iterdir()
    for damaged in ("{", "[]", json.dumps({"key": ["another"], "why": None})):
        file.write_text(damaged)
        assert first_use_memory.recall(key) is None
    monkeypatch.setenv("LOKA_CACHE", "/dev/null/nowhere")
    first_use.forget()
    assert first_use.why_failed(*key[:4], CPU) is None
    emulated = ("torch:rowwise" + EMULATED, *key[1:])
    first_use_memory.remember(emulated, None)
    assert first_use_memory.recall(emulated) is None


CHAIN = GemmShape(17, 144, 48, "block_norm:48:hard_swish+gain")


@pytest.mark.parametrize("epilogue", [CHAIN.epilogue, "block_norm:32:hard_sigmoid+gate"])
def test_a_kernel_that_runs_a_chain_is_tried_with_it(epilogue, monkeypatch):
    """On a CPU the op runs by its reference, which stands in for the kernel."""
    args = ("loka:rowwise", "fwd", replace(CHAIN, epilogue=epilogue), BF16, "cpu")
    assert first_use.run_and_compare(*args) is None
    real = chain.epilogue_ref

    def wrong(z, gain, block, *rest, **kwargs):
        return real(z, gain, 16, *rest, **kwargs)

    monkeypatch.setattr(chain, "epilogue_ref", wrong)
    assert first_use.run_and_compare(*args) is not None
