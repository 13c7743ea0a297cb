"""Run a function on two gloo ranks of this machine and bring its results back."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

WORLD = 2
_DEADLINE = timedelta(seconds=60)


def on_two_ranks(function: Callable[[int], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """[result of rank 0, result of rank 1].

    The ranks are forked: importing torch and FSDP twice more takes ten times as long as the tests. The parent runs on one
    thread (conftest), so no pool of it is lost in the fork.
    """
    multiprocessing.start_processes(_worker, args=(function, str(folder)), nprocs=WORLD, start_method="fork")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


def _worker(rank: int, function: Callable[[int], dict[str, Any]], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=_DEADLINE
    )
    try:
        torch.save(function(rank), Path(folder) / f"rank{rank}.pt")
    finally:
        dist.destroy_process_group()
