"""FSDP2: fp32 parameters, gradients and Adam state sharded over the ranks; compute and all-gather in the job's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

M = TypeVar("M", bound=nn.Module)


def build_sharded(
    build: Callable[[bool], M], mesh: DeviceMesh, *, compute: torch.dtype, master: torch.dtype | None
) -> M:
    """Make a model, shard it over the mesh and give every rank its part of rank 0's weights.

    Only rank 0 reads the weights. The other ranks hold untouched memory until their shard is copied in.

    Args:
        build: True makes the model with its weights, False without storage; the same modules both times.
        compute: type of the forward and backward pass.
        master: type of the parameters (fp32; fp64 in numerics tests); None keeps the loaded type.
    """
    first = mesh.get_rank() == 0
    model = build(first)
    if not first:
        _allocate(model)
    if master is not None:
        model.to(master)
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()} if first else {}
    _shard(model, mesh, compute)
    if mesh.size() > 1:
        _scatter(model, whole, mesh)
    return model


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole_tensors(model: nn.Module, names: Callable[[str], bool] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, on the device, one at a time. A collective: every rank must go through it to the end."""
    for name, parameter in model.named_parameters():
        if names is None or names(name):
            detached = parameter.detach()
            yield name, detached.full_tensor() if isinstance(detached, DTensor) else detached


def _shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype) -> None:
    master = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute,
        reduce_dtype=None if compute == master else torch.float32,
        # Teacher log-probabilities and advantages pass through forward and must stay in fp32.
        cast_forward_inputs=False,
    )
    blocks = set(getattr(model.model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    # The root keeps embedding and head whole between its forward and backward: the fused head reads the weight.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _allocate(model: nn.Module) -> None:
    """Storage for parameters on the meta device; parameters that two modules share stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = made[id(parameter)]


def _scatter(model: nn.Module, whole: dict[str, Tensor], mesh: DeviceMesh) -> None:
    """Rank 0's weights (and buffers) into everybody's shards, one tensor at a time."""
    _check_same_modules(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if name in whole:
                full.copy_(whole.pop(name))
            dist.broadcast(full, src=0)
            part = distribute_tensor(full, mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def _check_same_modules(model: nn.Module) -> None:
    """Ranks with other parameters would wait for each other until the deadline; say so instead."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    first = [mine]
    dist.broadcast_object_list(first, src=0)
    if first[0] != mine:
        other = sorted({entry[0] for entry in first[0]} ^ {entry[0] for entry in mine})
        raise RuntimeError(
            f"the model has other tensors on rank {dist.get_rank()} than on rank 0: {other[:5] or 'shapes'}"
        )
