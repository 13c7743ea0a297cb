"""One module for each wire format."""

from __future__ import annotations

from opd_api.v1alpha1 import TeacherBackend
from opd_trainer.teachers.adapters.lmdeploy import LmdeployAdapter
from opd_trainer.teachers.adapters.sglang import SglangAdapter
from opd_trainer.teachers.adapters.transformers import TransformersAdapter
from opd_trainer.teachers.adapters.vllm import VllmAdapter
from opd_trainer.teachers.wire import Adapter

ADAPTERS: dict[TeacherBackend, Adapter] = {
    TeacherBackend.SGLANG: SglangAdapter(),
    TeacherBackend.VLLM: VllmAdapter(),
    TeacherBackend.LMDEPLOY: LmdeployAdapter(),
    TeacherBackend.TRANSFORMERS: TransformersAdapter(),
}
