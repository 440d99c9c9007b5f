"""The fields of Jobs and JobSets, so that others are refused or dropped as a real server does: of
the parts that trainkit writes, all that the API has; others are not looked into."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.kinds import Kind, Object

ANY = None  # not looked into
Fields = Any  # {name: Fields}, [Fields] for a list's elements, or ANY


def fields(names: str, **known: Fields) -> dict[str, Fields]:
    """Fields that are not looked into, and those that are."""
    return {**dict.fromkeys(names.split()), **known}


META = fields(
    "name generateName namespace uid resourceVersion generation creationTimestamp labels"
    " annotations finalizers managedFields deletionTimestamp deletionGracePeriodSeconds selfLink",
    ownerReferences=[fields("apiVersion kind name uid controller blockOwnerDeletion")],
)
KEY = fields("key name optional")
ENV = fields(
    "name value",
    valueFrom=fields(
        "",
        fieldRef=fields("apiVersion fieldPath"),
        secretKeyRef=KEY,
        configMapKeyRef=KEY,
        resourceFieldRef=fields("containerName divisor resource"),
    ),
)
SECURITY = fields(
    "allowPrivilegeEscalation appArmorProfile privileged procMount readOnlyRootFilesystem"
    " runAsGroup runAsNonRoot runAsUser seLinuxOptions seccompProfile windowsOptions",
    capabilities=fields("add drop"),
)
CONTAINER = fields(
    "name image command args workingDir ports envFrom imagePullPolicy lifecycle livenessProbe"
    " readinessProbe startupProbe resizePolicy restartPolicy restartPolicyRules stdin stdinOnce"
    " terminationMessagePath terminationMessagePolicy tty volumeDevices",
    env=[ENV],
    resources=fields("limits requests claims"),
    securityContext=SECURITY,
    volumeMounts=[
        fields("name mountPath mountPropagation readOnly recursiveReadOnly subPath subPathExpr")
    ],
)
VOLUME = fields(
    "name configMap csi downwardAPI ephemeral image iscsi fc projected",
    emptyDir=fields("medium sizeLimit"),
    hostPath=fields("path type"),
    nfs=fields("path server readOnly"),
    persistentVolumeClaim=fields("claimName readOnly"),
    secret=fields("secretName items defaultMode optional"),
)
EXPRESSION = fields("key operator values")
SELECTOR = fields("matchLabels", matchExpressions=[EXPRESSION])
NODE_TERM = fields("", matchExpressions=[EXPRESSION], matchFields=[EXPRESSION])
POD_TERM = fields(
    "topologyKey namespaces namespaceSelector matchLabelKeys mismatchLabelKeys",
    labelSelector=SELECTOR,
)
REQUIRED, PREFERRED = (
    f"{each}DuringSchedulingIgnoredDuringExecution" for each in ("required", "preferred")
)
PODS = {REQUIRED: [POD_TERM], PREFERRED: [fields("weight", podAffinityTerm=POD_TERM)]}
AFFINITY = {
    "nodeAffinity": {
        REQUIRED: fields("", nodeSelectorTerms=[NODE_TERM]),
        PREFERRED: [fields("weight", preference=NODE_TERM)],
    },
    "podAffinity": PODS,
    "podAntiAffinity": PODS,
}
POD = fields(
    "activeDeadlineSeconds automountServiceAccountToken dnsConfig dnsPolicy enableServiceLinks"
    " ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname"
    " hostnameOverride nodeName nodeSelector os overhead preemptionPolicy priority"
    " priorityClassName readinessGates resourceClaims resources restartPolicy runtimeClassName"
    " schedulerName schedulingGroup securityContext serviceAccount serviceAccountName"
    " setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds"
    " topologySpreadConstraints",
    affinity=AFFINITY,
    containers=[CONTAINER],
    initContainers=[CONTAINER],
    imagePullSecrets=[fields("name")],
    schedulingGates=[fields("name")],
    tolerations=[fields("effect key operator tolerationSeconds value")],
    volumes=[VOLUME],
)
TEMPLATE = {"metadata": META, "spec": POD}
FAILURE_RULE = fields(
    "action",
    onExitCodes=fields("containerName operator values"),
    onPodConditions=[fields("type status")],
)
JOB = fields(
    "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy"
    " manualSelector maxFailedIndexes parallelism podReplacementPolicy suspend"
    " ttlSecondsAfterFinished",
    podFailurePolicy={"rules": [FAILURE_RULE]},
    selector=SELECTOR,
    successPolicy={"rules": [fields("succeededCount succeededIndexes")]},
    template=TEMPLATE,
)
SET_RULE = fields(
    "name action onJobFailureReasons onJobFailureMessagePatterns targetReplicatedJobs"
)
REPLICATED = fields(
    "name groupName replicas",
    dependsOn=[fields("name status")],
    template={"metadata": META, "spec": JOB},
)
JOBSET = fields(
    "managedBy suspend ttlSecondsAfterFinished",
    coordinator=fields("replicatedJob jobIndex podIndex"),
    failurePolicy=fields("maxRestarts restartStrategy", rules=[SET_RULE]),
    network=fields("enableDNSHostnames publishNotReadyAddresses subdomain"),
    replicatedJobs=[REPLICATED],
    startupPolicy=fields("startupPolicyOrder"),
    successPolicy=fields("operator targetReplicatedJobs"),
    volumeClaimPolicies=[fields("templates retentionPolicy")],
)
TOP = fields("apiVersion kind status", metadata=META)
SCHEMAS = {"jobs": {**TOP, "spec": JOB}, "jobsets": {**TOP, "spec": JOBSET}}
SCHEMAS["pods"] = {**TOP, "spec": POD}


def pruned(kind: Kind, obj: Object) -> tuple[Object, list[str]]:
    """The object without fields that its kind does not have, and the paths of those."""
    unknown: list[str] = []
    schema = SCHEMAS.get(kind.plural)
    return (_pruned(schema, obj, "", unknown) if schema else obj), unknown


def _pruned(schema: Fields, value: Any, path: str, unknown: list[str]) -> Any:
    if isinstance(schema, dict) and isinstance(value, dict):
        unknown += [f"{path}{name}" for name in value if name not in schema]
        return {
            name: _pruned(schema[name], each, f"{path}{name}.", unknown)
            for name, each in value.items()
            if name in schema
        }
    if isinstance(schema, list) and isinstance(value, list):
        here = path.removesuffix(".")
        return [
            _pruned(schema[0], each, f"{here}[{number}].", unknown)
            for number, each in enumerate(value)
        ]
    return value
