"""Children of a teacher that the operator serves: a Deployment, a headless Service, and the job's Secret with API keys."""

from __future__ import annotations

from opd_api.trainer_config import TeacherAddress
from opd_api.v1alpha1 import OPDJobSpec, Teacher, TeacherBackend
from opd_api.vocabulary import Annotation, Label, Port, Role
from opd_operator.children import names
from opd_operator.children.context import JobContext, with_spec_hash
from opd_operator.children.engines import ADMIN_KEY, API_KEY, API_KEY_VARIABLE, KEY_FOLDER, engine
from opd_operator.children.pods import PodParts, pod_template, secret_variable
from opd_operator.model import Manifest
from opd_operator.planned import SecretRequest

#: Beyond the startup budget, so that the Deployment never gives up before the pod's own probe does.
PROGRESS_EXTRA_SECONDS = 60
TERMINATION_GRACE_SECONDS = 10


def served(spec: OPDJobSpec) -> list[Teacher]:
    """Teachers that get a Deployment."""
    return [teacher for teacher in spec.teachers if teacher.served_by_operator and not teacher.external]


def probed(spec: OPDJobSpec) -> list[Teacher]:
    """Teachers that answer over HTTP, whoever runs them."""
    return [teacher for teacher in spec.teachers if teacher.external or teacher.served_by_operator]


def url(job: JobContext, teacher: Teacher) -> str:
    """Base URL of a served teacher; the headless name stands for all its replicas."""
    host = f"{names.teacher(job.name, teacher.name)}.{job.namespace}.svc.{job.settings.cluster_domain}"
    return f"http://{host}:{Port.TEACHER}"


def address(job: JobContext, teacher: Teacher) -> TeacherAddress:
    """Where the trainer finds a teacher, and in which variable its key is."""
    if teacher.external:
        variable = key_variable(teacher) if teacher.api_key_secret_ref else None
        return TeacherAddress(name=teacher.name, urls=teacher.endpoints, api_key_env=variable, served_model=None)
    if teacher.backend is TeacherBackend.INPROCESS:
        return TeacherAddress(name=teacher.name, urls=[], api_key_env=None, served_model=None)
    return TeacherAddress(
        name=teacher.name,
        urls=[url(job, teacher)],
        api_key_env=API_KEY_VARIABLE,
        served_model=teacher.model.source if teacher.model else None,
    )


def key_variable(teacher: Teacher) -> str:
    """Variable with the key of an external teacher."""
    return f"{API_KEY_VARIABLE}_{teacher.name.upper().replace('-', '_')}"


def client_variables(job: JobContext) -> list[Manifest]:
    """Variables of a pod that talks to the teachers (head and probe)."""
    found: list[Manifest] = []
    if served(job.spec):
        found.append(secret_variable(API_KEY_VARIABLE, names.keys_secret(job.name, job.uid8), API_KEY))
    for teacher in job.spec.teachers:
        if teacher.external and teacher.api_key_secret_ref:
            reference = teacher.api_key_secret_ref
            found.append(secret_variable(key_variable(teacher), reference.name, reference.key))
    return found


def keys_secret(job: JobContext) -> SecretRequest:
    """The Secret with the API keys; its values are made where it is created."""
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": job.metadata(names.keys_secret(job.name, job.uid8), Role.TEACHER),
        "type": "Opaque",
        "immutable": True,
    }
    return SecretRequest(manifest=manifest, keys=(API_KEY, ADMIN_KEY))


def service(job: JobContext, teacher: Teacher) -> Manifest:
    """Headless Service: only ready pods get an address, and the trainer chooses among them itself."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": job.metadata(names.teacher(job.name, teacher.name), Role.TEACHER, teacher=teacher.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": _selector(job, teacher),
            "ports": [{"name": "http", "port": Port.TEACHER, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def deployment(job: JobContext, teacher: Teacher, restart: int) -> Manifest:
    """Deployment of the replicas. `restart` is the restart counter: another number replaces the pods."""
    server = engine(job, teacher, names.keys_secret(job.name, job.uid8))
    memory = {"name": "keys", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    template = pod_template(
        job,
        PodParts(
            role=Role.TEACHER,
            teacher=teacher.name,
            placement=teacher,
            accelerators=teacher.tensor_parallel_size,
            env=server.env,
            volumes=[memory] if server.key_folder else [],
            mounts=[{"name": "keys", "mountPath": KEY_FOLDER}] if server.key_folder else [],
            annotations={Annotation.RESTART.value: str(restart)},
            pod={"terminationGracePeriodSeconds": TERMINATION_GRACE_SECONDS},
            container={
                "name": "teacher",
                "image": _image(job, teacher),
                "command": server.command,
                "args": server.args,
                "ports": [{"name": "http", "containerPort": Port.TEACHER, "protocol": "TCP"}],
                **server.probes(teacher.startup_timeout_seconds),
            },
            template=teacher.template,
        ),
    )
    metadata = job.metadata(names.teacher(job.name, teacher.name), Role.TEACHER, teacher=teacher.name)
    metadata["annotations"] = {Annotation.RESTART.value: str(restart)}
    return with_spec_hash(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": teacher.replicas,
                "selector": {"matchLabels": _selector(job, teacher)},
                # A new pod next to the old one would need twice the accelerators.
                "strategy": {"type": "Recreate"},
                "progressDeadlineSeconds": teacher.startup_timeout_seconds + PROGRESS_EXTRA_SECONDS,
                "revisionHistoryLimit": 1,
                "template": template,
            },
        }
    )


def _image(job: JobContext, teacher: Teacher) -> str:
    if teacher.image:
        return teacher.image
    if teacher.backend is TeacherBackend.TRANSFORMERS:
        return job.image
    return job.settings.image_of(teacher.backend)


def _selector(job: JobContext, teacher: Teacher) -> dict[str, str]:
    return {Label.JOB.value: names.job_label(job.name), Label.TEACHER.value: teacher.name}
