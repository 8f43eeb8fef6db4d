"""How a pod names the start that it belongs to, by what its operator sets on its pods.

A pod can read its own labels, annotations, uid and name (the downward API), not the uid of the
object that owns it. `bootseer import k8s` resolves the same variables, so both sides agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bootseer.kubernetes.manifest_text import child, labels, scalar
from bootseer.kubernetes.pods import Pod, is_pod_of_kind

JOB_UID_KEY = "bootseer.io/job-uid"
"""Key of the label or annotation by which a manifest names the start itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Where a pod finds the name of its start: a downward API `fieldPath`, or the literal `text`.

    `is_name`: the field has the job's name alone. The namespace makes it unique among running jobs,
    but not against an earlier job of that name, which a report distinguishes by the pods' uids
    (`bootseer.profiler.report.load.runs`). `name` is that name where no field has it: it is then
    written into the pods. `attempt` is the field that counts the job's restarts,
    "" where the operator sets none.
    """

    field: str = "metadata.uid"
    is_name: bool = False
    name: str = ""
    attempt: str = ""
    text: str = ""


def _format_label_path(name: str) -> str:
    return f"metadata.labels['{name}']"


def _format_annotation_path(name: str) -> str:
    return f"metadata.annotations['{name}']"


OWN_UID = Identity()
"""Each pod is a start of its own."""

# kubernetes/kubernetes, pkg/apis/batch/types.go, LegacyControllerUidLabel: on the pods of every
# version, alongside batch.kubernetes.io/controller-uid since 1.27.
BATCH_JOB = Identity(_format_label_path("controller-uid"))

# kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go (JobSetUIDKey) and
# pkg/constants/constants.go (RestartsKey); pkg/controllers/jobset_controller.go,
# labelAndAnnotateObject, sets both on the pods' templates. Kubeflow Trainer makes JobSets.
_JOBSET = Identity(
    _format_label_path("jobset.sigs.k8s.io/jobset-uid"),
    attempt=_format_label_path("jobset.sigs.k8s.io/restart-attempt"),
)

# volcano-sh/volcano, pkg/controllers/job/job_controller_util.go, createJobPod: the pod group is
# NAME-UID of the job; KubeGroupNameAnnotationKey and JobRetryCountKey of volcano.sh/apis.
_VOLCANO = Identity(
    _format_annotation_path("scheduling.k8s.io/group-name"),
    attempt=_format_annotation_path("volcano.sh/job-retry-count"),
)

# kubeflow/training-operator (release 1.9), pkg/apis/kubeflow.org/v1/common_types.go, and
# kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/constants.go: JobNameLabel.
_KUBEFLOW = Identity(_format_label_path("training.kubeflow.org/job-name"), is_name=True)

# ray-project/kuberay, ray-operator/controllers/ray/common/pod.go, labelPod. The clusters of a
# RayJob and a RayService have a random suffix (controllers/ray/utils/util.go,
# GenerateRayClusterName), so that their name is new with every run.
_RAY_CLUSTER = _format_label_path("ray.io/cluster")

# kubernetes-sigs/lws, pkg/webhooks/pod_webhook.go, genGroupUniqueKey: the hash of namespace and
# name of the group's leader. The pods of a group start together.
_LEADER_WORKER = Identity(_format_label_path("leaderworkerset.sigs.k8s.io/group-key"), is_name=True)

IDENTITIES: Sequence[tuple[str, tuple[str, ...], tuple[str, ...], Identity]] = (
    ("batch", ("Job", "CronJob"), (), BATCH_JOB),
    ("jobset.x-k8s.io", ("JobSet",), (), _JOBSET),
    ("trainer.kubeflow.org", ("TrainingRuntime", "ClusterTrainingRuntime"), (), _JOBSET),
    ("batch.volcano.sh", ("Job",), (), _VOLCANO),
    # pkg/controllers/jobtemplate: makes jobs of its spec.
    ("flow.volcano.sh", ("JobTemplate",), (), _VOLCANO),
    (
        "kubeflow.org",
        ("PyTorchJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob", "MPIJob"),
        (),
        _KUBEFLOW,
    ),
    # controllers/ray/rayjob_controller.go, createNewK8sJob: a batch/v1 Job submits.
    ("ray.io", ("RayJob",), ("spec.submitterPodTemplate.",), BATCH_JOB),
    ("ray.io", ("RayCronJob",), ("spec.jobTemplate.submitterPodTemplate.",), BATCH_JOB),
    ("ray.io", ("RayJob", "RayService", "RayCronJob"), (), Identity(_RAY_CLUSTER)),
    ("ray.io", ("RayCluster",), (), Identity(_RAY_CLUSTER, is_name=True)),
    ("leaderworkerset.x-k8s.io", ("LeaderWorkerSet",), (), _LEADER_WORKER),
    # pkg/controllers/disaggregatedset: makes LeaderWorkerSets.
    ("disaggregatedset.x-k8s.io", ("DisaggregatedSet",), (), _LEADER_WORKER),
)
"""(API group, kinds, prefixes of the pod's path, identity); the first match counts.

Pods of any other kind are starts of their own: those of a Deployment, ReplicaSet or DaemonSet are
replaced one by one, and a step of an Argo workflow waits for no other. The same holds for kinds
unknown here, as nothing says whether their pods start together. A StatefulSet makes each pod when
the previous one is ready, unless its podManagementPolicy is Parallel.
"""


def identify(pod: Pod, job_uid: str = "") -> Identity:
    """Find what names the start of this pod; `job_uid`, if given, names that of all pods."""
    if job_uid:
        return Identity(text=job_uid)
    if JOB_UID_KEY in labels(child(pod.template, "metadata", "annotations")):
        return Identity(_format_annotation_path(JOB_UID_KEY))
    if JOB_UID_KEY in labels(child(pod.template, "metadata", "labels")):
        return Identity(_format_label_path(JOB_UID_KEY))
    for group, kinds, paths, identity in IDENTITIES:
        if is_pod_of_kind(pod, group, kinds) and (not paths or pod.path.startswith(paths)):
            return identity
    if _starts_at_once(pod):
        return Identity(is_name=True, name=pod.owner_name)
    return OWN_UID


def _starts_at_once(pod: Pod) -> bool:
    """Whether a StatefulSet makes this pod together with its others, whose fields name no start
    (kubernetes/kubernetes, pkg/controller/statefulset/stateful_set_utils.go)."""
    policy = scalar(child(pod.owner, "spec", "podManagementPolicy"))
    is_set = is_pod_of_kind(pod, "apps", ("StatefulSet",)) and pod.path.startswith("spec.template.")
    return is_set and policy == "Parallel" and bool(pod.owner_name)
