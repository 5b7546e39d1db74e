"""Other processes: ranks, and those that compile."""

from __future__ import annotations

from typing import Any


def default_store() -> Any:
    """The key-value store of the default process group. Torch 2.11 to 2.14 have no public name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def compile_in_processes(count: int) -> None:
    """Let Inductor compile kernels in `count` processes, and start them now.

    Setting the number alone leaves the first kernels to this process: the pool starts with them.
    """
    from torch._inductor import async_compile
    from torch._inductor import config

    config.compile_threads = count
    warm = getattr(async_compile, "maybe_warm_pool", None)
    if warm is not None:
        warm()
