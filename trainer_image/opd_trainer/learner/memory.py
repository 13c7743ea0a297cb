"""Whether parameters, gradients and optimizer state fit, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from opd_api.vocabulary import FailureClass, Reason
from opd_trainer.errors import TrainerError

#: fp32 parameter, gradient and two Adam moments.
BYTES_TRAINED = 16
#: fp32 parameter that an adapter leaves frozen.
BYTES_FROZEN = 4
_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Parameters of a job, over all ranks."""

    trained: int
    frozen: int = 0
    #: Bytes of in-process teachers.
    teachers: int = 0

    def per_rank(self, ranks: int) -> float:
        """Bytes that one rank holds for good; activations come on top."""
        return (BYTES_TRAINED * self.trained + BYTES_FROZEN * self.frozen + self.teachers) / ranks

    def arithmetic(self, ranks: int) -> str:
        """The sum as a reader can check it."""
        terms = [f"{BYTES_TRAINED} bytes x {self.trained:,} trained parameters"]
        if self.frozen:
            terms.append(f"{BYTES_FROZEN} bytes x {self.frozen:,} frozen parameters")
        if self.teachers:
            terms.append(f"{self.teachers:,} bytes of in-process teachers")
        total = " + ".join(terms)
        total = f"({total})" if len(terms) > 1 else total
        return f"{total} / {ranks} rank{'s' if ranks > 1 else ''} = {self.per_rank(ranks) / _GIB:.2f} GiB"


def check_memory(need: MemoryNeed, *, ranks: int, free: float) -> None:
    """Raises TrainerError(Config, NotEnoughMemory) with the arithmetic. `free` is bytes for one rank."""
    wanted = need.per_rank(ranks)
    if wanted <= free:
        return
    enough = math.ceil(need.per_rank(1) / free) if free > 0 else 0
    remedy = f"set training.gpus to {enough} or more" if enough else "use a larger node"
    raise TrainerError(
        FailureClass.CONFIG,
        Reason.NOT_ENOUGH_MEMORY,
        f"each rank needs {need.arithmetic(ranks)}, but {free / _GIB:.2f} GiB are free; {remedy}, or train adapters"
        " (student.lora)",
    )


def free_memory(device: torch.device, ranks_on_host: int) -> float:
    """Bytes that one rank may use: the accelerator's, or its share of the host's (cgroup limits included)."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return min(_host_free(), _cgroup_free()) / ranks_on_host


def _host_free() -> float:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return math.inf


def _cgroup_free() -> float:
    """Memory left below the limit of the container; infinite without one. Page cache can be reclaimed and counts as free."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = float((_CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return math.inf
    return math.inf if limit == "max" else float(limit) - used + float(statistics.get("inactive_file", 0))
