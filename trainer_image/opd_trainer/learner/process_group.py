"""torch.distributed between the ranks: who is the store, which backend, and how long to wait."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def open_store(host: str, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Rank 0's store on a port that the kernel picks and that is held from then on, so that no other process can take it."""
    return dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)


def backend(device: str) -> str:
    """gloo on CPUs; with accelerators NCCL for tensors on them and gloo for the small things on the CPU."""
    if device == "cuda" and torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def join(
    *,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    device: str,
    timeout: timedelta,
    store: dist.Store | None = None,
) -> None:
    """Initialise the default group. Every collective has `timeout` as its deadline."""
    if store is None:
        store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    if device == "cuda":
        torch.cuda.set_device(0)  # Ray shows each actor its own accelerator as number 0
    dist.init_process_group(backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout)
