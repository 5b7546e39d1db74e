"""One library's share of `bench_gemm.py`, in a process of its own: see there.

python benchmarks/gemm_library.py --library torch --rows FILE --deadline SECONDS
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: (M, K, N). The nine of Figure 13 at M = 1024 first, then what large recommendation models have:
#: input towers, deep and square layers, widths that are multiples of d = 160, long flattened
#: embeddings, small heads, and sizes that are multiples of neither 128 nor 16.
FIGURE_13 = [
    (256, 256), (7680, 256), (512, 512), (7680, 512), (4096, 2048), (4096, 2560), (2048, 4096),
    (2560, 4096), (256, 7680),
]  # fmt: skip
SHAPES = [(1024, k, n) for k, n in FIGURE_13] + [
    (1000, 512, 384),
    (2048, 256, 768), (4096, 2048, 2048), (6144, 2048, 2048), (8192, 2048, 2048),
    (16384, 2048, 2048), (4096, 8256, 2048), (1024, 8256, 2048), (2048, 123200, 1024),
    (2048, 1600, 1600), (4096, 160, 640), (2048, 4800, 1280), (2048, 5760, 1920),
    (4096, 2048, 512), (4096, 512, 256), (2048, 768, 512), (1024, 7680, 7680),
    (8192, 4096, 4096), (256, 2048, 2048), (512, 4096, 2048), (128, 1024, 1024),
    (4096, 1000, 1000), (2048, 712, 896), (3001, 1536, 1040),
    (2048, 2050, 510), (4096, 1024, 8192), (8192, 1024, 1024),
]  # fmt: skip
DIRECTIONS = ("fwd", "dgrad", "wgrad")
HIGH = "high_precision"
#: Compiles a kernel per shape with nvcc.
COMPILES_FIRST = "deep_gemm"
Cell = tuple[str, str, int, int, int, str]


def cell_of(row: dict[str, Any]) -> Cell:
    return (row["library"], row["recipe"], row["M"], row["K"], row["N"], row["direction"])


def failed(cell: Cell, reason: str) -> dict[str, Any]:
    name, recipe, m, k, n, direction = cell
    return {
        "library": name, "recipe": recipe, "direction": direction, "M": m, "K": k, "N": n,
        "gemm_us": None, "total_us": None, "rel_error": None, "available": False, "reason": reason,
    }  # fmt: skip


def read(rows: Path) -> list[dict[str, Any]]:
    if not rows.exists():
        return []
    found = []
    for line in rows.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the line that a dying process was writing
    return found


def time_us(run: Any, rep: float = 2.0) -> float:
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(run, rep=rep, return_mode="median") * 1e3


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """The device to ourselves, among the processes of this benchmark."""
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


class Bench:
    """All cells of one library on the present device."""

    def __init__(self, library: str, lock: Path, every: int = 1) -> None:
        """every: of the shapes only each n-th."""
        import torch

        from loka_compile.lowering.libraries import LIBRARIES

        self.torch = torch
        self.lock = lock
        self.name = library
        self.shapes = SHAPES[::every]
        self.library = None if library == HIGH else LIBRARIES[library]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.shape: tuple[int, int, int] | None = None
        self.sources: dict[str, Any] = {}
        self.references: dict[str, Any] = {}
        self.compiled: dict[Any, Any] = {}
        # Two sizes that happen to be equal are not the same size.
        torch.fx.experimental._config.use_duck_shape = False
        # One code object serves all rules; past the limit it would run in eager, unnoticed.
        torch._dynamo.config.recompile_limit = 512
        torch._dynamo.config.accumulated_recompile_limit = 4096
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    def recipes(self) -> list[str]:
        return [HIGH] if self.library is None else list(self.library.recipes)

    def cells(self) -> Iterator[Cell]:
        for m, k, n in self.shapes:
            for recipe in self.recipes():
                for direction in DIRECTIONS:
                    if self.library is None or self.library.recipes[recipe].gemm(direction):
                        name = "torch" if self.library is None else self.name
                        yield name, recipe, m, k, n, direction

    def operands(self, direction: str, m: int, k: int, n: int) -> tuple[Any, Any]:
        """A (rows, contraction) and B (rows, contraction) in bf16, as views of x, w, gy."""
        torch = self.torch
        if self.shape != (m, k, n):
            self.shape = (m, k, n)
            self.references.clear()
            generator = torch.Generator(self.device).manual_seed(0)

            def normal(*size: int) -> Any:
                made = torch.randn(*size, device=self.device, generator=generator)
                return made.to(torch.bfloat16)

            self.sources = {"x": normal(m, k), "w": normal(n, k), "gy": normal(m, n)}
        x, w, gy = (self.sources[s] for s in ("x", "w", "gy"))
        return {"fwd": (x, w), "dgrad": (gy, w.t()), "wgrad": (gy.t(), x.t())}[direction]

    def reference(self, direction: str, a: Any, b: Any) -> Any:
        if direction not in self.references:
            self.references[direction] = a.float() @ b.float().t()
        return self.references[direction]

    def twin(self, cell: Cell) -> Cell | None:
        """The cell of an earlier recipe that asks for the very same kernel, if there is one."""
        name, recipe, m, k, n, direction = cell
        if self.library is None:
            return None
        rule = self.library.recipes[recipe].gemm(direction)
        for other in self.library.recipes:
            if other == recipe:
                return None
            if self.library.recipes[other].gemm(direction) == rule:
                return name, other, m, k, n, direction
        return None

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch = self.torch
        _, recipe, m, k, n, direction = cell
        row = failed(cell, "")
        row["reason"] = self.why_not(recipe, direction, m, k, n) or ""
        if row["reason"]:
            return row
        a, b = self.operands(direction, m, k, n)
        rule = self.library and self.library.recipes[recipe].gemm(direction)
        with torch.no_grad():
            ready = self.library and self.quantiser(recipe, direction, rule, a, b)
            if ready:
                # Compiling needs no device to itself, nor does a kernel that its library compiles
                # at the first call; one that tunes itself then does.
                operands = ready(a, b)
                if self.name == COMPILES_FIRST:
                    self.call()(*operands, rule, torch.bfloat16)
                torch.cuda.synchronize()
            with turn(self.lock):
                if ready:
                    out = self.quantised(row, ready, rule, a, b)
                else:
                    out = a @ b.t()
                    row["gemm_us"] = row["total_us"] = time_us(lambda: a @ b.t())
                want = self.reference(direction, a, b)
                row["rel_error"] = float((out.float() - want).norm() / want.norm())
        row["available"] = True
        if not row["rel_error"] < 0.2:
            row.update(available=False, reason=f"wrong: relative error {row['rel_error']:.3g}")
            row["rel_error"] = row["rel_error"] if row["rel_error"] < 1e30 else None
        return row

    def call(self) -> Any:
        """The kernel; an adapter may be one function that lays out and calls."""
        from loka_compile.lowering.libraries.base import Library

        library = self.library
        return library.gemm if type(library).call is Library.call else library.call

    def why_not(self, recipe: str, direction: str, m: int, k: int, n: int) -> str | None:
        from loka_compile.lowering.libraries.base import GemmShape

        if self.library is None:
            return None if self.device.type == "cuda" else "torch sees no CUDA device"
        why = self.library.why_no_recipe(recipe, self.device)
        return why or self.library.why_not(recipe, direction, GemmShape(m, k, n))

    def quantised(self, row: dict[str, Any], ready: Any, rule: Any, a: Any, b: Any) -> Any:
        """Fill in the two times; the result of the kernel on A and B."""
        torch = self.torch
        call = self.call()
        prepared = [t.clone() for t in ready(a, b)]
        columns = b.shape[0]

        def kernel() -> Any:
            return call(*prepared, rule, torch.bfloat16)

        def total() -> Any:
            out = call(*ready(a, b), rule, torch.bfloat16)
            return out[:, :columns].contiguous() if out.shape[1] != columns else out

        out = total()
        torch.cuda.synchronize()
        row["gemm_us"] = time_us(kernel)
        row["total_us"] = time_us(total)
        return out

    def quantiser(self, recipe: str, direction: str, rule: Any, a: Any, b: Any) -> Any:
        """(A, B) -> what `call` takes: our Triton quantisers, and the library's layout of scales.

        A library with arithmetic of its own gets it compiled by Inductor.
        """
        library = self.library
        if not library.own_scales:
            return self.compiled_quantise(recipe, direction, rule)

        def ready(a: Any, b: Any) -> Any:
            qa, sa = quantised_operand(a, rule.a, rows_up=False)
            qb, sb = quantised_operand(b, rule.b, rows_up=True)
            return library.prepare(qa, sa, qb, sb, rule)

        return ready

    def compiled_quantise(self, recipe: str, direction: str, rule: Any) -> Any:
        from loka_compile.kernels.quantize_blockwise import fill

        torch, library = self.torch, self.library
        key = (rule.a, rule.b, direction)
        if key not in self.compiled:

            def quantise(a: Any, b: Any) -> Any:
                a, b = fill(a, 1, 16), fill(b, 16, 16)
                qa, sa = library.quantize(recipe, a, rule.a)
                qb, sb = library.quantize(recipe, b, rule.b)
                return library.prepare(qa.contiguous(), sa, qb.contiguous(), sb, rule)

            self.compiled[key] = torch.compile(quantise, dynamic=True)
        return self.compiled[key]


def quantised_operand(t: Any, rule: Any, *, rows_up: bool) -> tuple[Any, Any]:
    """t (rows, contraction), as it lies or a transposed view -> FP8 and scales, sizes up to 16."""
    from loka_compile.kernels.orientations import Scale
    from loka_compile.kernels.quantize_blockwise import fill
    from loka_compile.kernels.quantize_both import quantize_both

    how = Scale(rule.granularity.value, rule.dtype)
    if t.stride(-1) == 1:
        out = quantize_both(t, how, None, rows_up=rows_up, columns_up=True)
        q, scale = out.q, out.scale
    else:
        out = quantize_both(t.t(), None, how, columns_up=rows_up)
        q, scale = out.qt, out.scale_t
    return q, fill(scale, 16, 1) if how.kind in ("row", "1x128") and rows_up else scale


def run_library(library: str, rows: Path, deadline: float, every: int) -> int:
    """Measure what `rows` lacks of `library`, writing a line before and after each cell."""
    bench = Bench(library, rows.with_name("turn.lock"), every)
    done = {cell_of(row): row for row in read(rows) if "started" not in row}
    with rows.open("a") as out:
        for cell in bench.cells():
            if cell in done:
                continue
            if time.time() > deadline:
                return 3
            twin = done.get(bench.twin(cell) or cell)
            if twin is not None:
                done[cell] = {**twin, "recipe": cell[1]}
                out.write(json.dumps(done[cell]) + "\n")
                continue
            out.write(json.dumps({"started": cell}) + "\n")
            out.flush()
            try:
                row = bench.measure(cell)
            except Exception as e:
                said = (str(e).strip().splitlines() or [""])[0][:300]
                row = failed(cell, f"{type(e).__name__}: {said}")
                if "CUDA error" in str(e) or "CUDA driver error" in str(e):
                    out.write(json.dumps(row) + "\n")
                    return 4  # the context is unusable: the next process goes on
            done[cell] = row
            out.write(json.dumps(row) + "\n")
            out.flush()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True, help="in seconds of time.time()")
    parser.add_argument("--every", type=int, default=1, help="only each n-th shape")
    args = parser.parse_args()
    return run_library(args.library, args.rows, args.deadline, args.every)


if __name__ == "__main__":
    sys.exit(main())
