"""Reading oracle vectors: format `opd-oracle-vectors/1`, one npz per family beside manifest.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One case of a family: its inputs as tensors, its parameters and flags."""

    family: str
    id: str
    params: dict[str, Any]
    flags: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    labels: dict[str, list[str]]

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]

    def leaf(self, name: str) -> Tensor:
        """The input as a fresh leaf that wants a gradient."""
        return self.inputs[name].detach().clone().requires_grad_()

    def with_inputs(self, **changed: Tensor) -> Case:
        return Case(
            self.family, self.id, self.params, self.flags, {**self.inputs, **changed}, self.outputs, self.labels
        )


@dataclass(frozen=True)
class Output:
    """An output of a family's glossary: how it was called and how closely it must be met."""

    name: str
    call: dict[str, Any]
    tolerance: str


@dataclass(frozen=True)
class Family:
    name: str
    folder: Path
    raw: dict[str, Any]
    tolerances: dict[str, Any]

    @cached_property
    def outputs(self) -> dict[str, Output]:
        return {
            name: Output(name, entry.get("call") or {}, entry["tolerance"])
            for name, entry in self.raw["arrays"].items()
            if entry["role"] == "output"
        }

    def case_ids(self) -> list[str]:
        return [case["id"] for case in self.raw["cases"]]

    def case(self, case_id: str) -> Case:
        raw = next(case for case in self.raw["cases"] if case["id"] == case_id)
        with np.load(self.folder / self.raw["file"]) as arrays:
            read = {
                role: {name: torch.from_numpy(np.array(arrays[entry["key"]])) for name, entry in raw[role].items()}
                for role in ("inputs", "outputs")
            }
        labels = {name: entry["labels"] for name, entry in raw["outputs"].items() if "labels" in entry}
        return Case(self.name, case_id, raw["params"], raw["flags"], read["inputs"], read["outputs"], labels)

    def bounds(self, output: Output, case: Case) -> tuple[float, float]:
        """(rtol, atol) of an output in a case."""
        name, double = output.tolerance, case.params.get("input_dtype") == "f64"
        gradient = output.name.endswith("_grad")
        if name == "case_dtype":
            name = "f64" if double else "f32_grad" if gradient else "f32"
        elif name == "case_dtype_loose":
            if double:
                return 1e-8, 1e-10
            name = "f32_grad"
        entry = self.tolerances[name]
        if "atol_times_max_abs_logratio" in entry:
            scale = max(1.0, case.params["max_abs_logratio"])
            return entry["rtol"], entry["atol_times_max_abs_logratio"] * scale
        return entry["rtol"], entry["atol"]


def families(folder: Path) -> Iterator[Family]:
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["format"] != "opd-oracle-vectors/1":
        raise ValueError(f"{folder}: unknown format {manifest['format']}")
    for raw in manifest["families"]:
        yield Family(raw["name"], folder, raw, manifest["tolerances"])
