"""The manifests of configs/kubernetes have the types of their APIs: Kubernetes' own as its Python client has them, those of JobSet and of
the MPI operator by the schemas below."""

import re

import jsonschema
import pytest
import yaml
from kubernetes import client

from test_manifests import MANIFESTS, ROOT


def check_type(kind, value, place):
    """Every key is one of the API's, every value has its type, and no required one is missing."""
    if kind.lower().startswith("list["):
        assert isinstance(value, list), place
        for i, item in enumerate(value):
            check_type(kind[5:-1], item, f"{place}[{i}]")
    elif kind.lower().startswith(("dict(", "dict[")):
        inner = kind[5:-1].split(",")[1].strip()
        assert isinstance(value, dict), place
        for key, item in value.items():
            if inner == "str" and "esources" in place:  # a quantity: 8, "400Gi"
                assert re.fullmatch(r"\d+(\.\d+)?([KMGT]i?)?", str(item)), place
            else:
                check_type(inner, item, f"{place}.{key}")
    elif hasattr(client, kind):
        model = getattr(client, kind)
        names = {public: name for name, public in model.attribute_map.items()}
        assert isinstance(value, dict) and value.keys() <= names.keys(), f"{place}: {sorted(value.keys() - names.keys())}"
        required = {model.attribute_map[name] for name, field in model.model_fields.items() if field.is_required()}
        assert required <= value.keys(), f"{place}: {sorted(required - value.keys())}"
        for key, item in value.items():
            check_type(model.openapi_types[names[key]], item, f"{place}.{key}")
    else:
        types = {"str": str, "int": int, "bool": bool, "object": object}
        assert isinstance(value, types[kind]) and (kind != "int" or not isinstance(value, bool)), f"{place}: {value!r} is no {kind}"


def closed(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


TEXT, COUNT, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {}
# The parts of JobSet's (v1alpha2) and MPIJob's (v2beta1) types that are not Kubernetes' own.
JOBSET = closed(["replicatedJobs"], replicatedJobs={"type": "array", "items": closed(["name", "template"], name=TEXT, replicas=COUNT, template=ANY)},
                failurePolicy=closed(maxRestarts=COUNT, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}, rules={"type": "array", "items": closed(
                    ["action"], name=TEXT, action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]}, targetReplicatedJobs={"type": "array", "items": TEXT},
                    onJobFailureReasons={"type": "array", "items": {"enum": ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]}})}))
MPIJOB = closed(["mpiReplicaSpecs"], slotsPerWorker=COUNT, mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]}, launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
                runPolicy=closed(cleanPodPolicy={"enum": ["None", "Running", "All"]}, backoffLimit=COUNT, ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=COUNT, suspend={"type": "boolean"}),
                mpiReplicaSpecs=closed(["Launcher"], **{name: closed(["template"], replicas=COUNT, template=ANY, restartPolicy={"enum": ["Never", "OnFailure"]}) for name in ("Launcher", "Worker")}))


def check_manifest(manifest):
    kind, spec = manifest["kind"], manifest["spec"]
    assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
    check_type("V1ObjectMeta", manifest["metadata"], "metadata")
    if kind == "Job":
        check_type("V1JobSpec", spec, "spec")
    elif kind == "JobSet":
        jsonschema.validate(spec, JOBSET)
        for job in spec["replicatedJobs"]:
            check_type("V1JobTemplateSpec", job["template"], job["name"])
    else:
        jsonschema.validate(spec, MPIJOB)
        for name, replica in spec["mpiReplicaSpecs"].items():
            check_type("V1PodTemplateSpec", replica["template"], name)


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_has_the_types_of_its_api(name):
    check_manifest(MANIFESTS[name])


@pytest.mark.parametrize("name, old, new", [
    ("job", "backoffLimit: 5", "backofLimit: 5"), ("job", "restartPolicy: Never", "restartPolicy: 1"), ("job", "operator: In", "operators: In"),
    ("job", "containerPort: 9400", "containerPort: http"), ("job", "memory: 400Gi", "memory: 400GB"), ("job", "- name: lmlaunch\n", "- nam: lmlaunch\n"),
    ("jobset", "action: FailJobSet", "action: Fail"), ("jobset", "maxRestarts: 3", "restarts: 3"), ("mpijob", "slotsPerWorker: 8", "slotsPerWorker: many"),
    ("mpijob", "terminationGracePeriodSeconds: 600", "gracePeriod: 600")])
def test_a_manifest_with_a_mistake_is_found(name, old, new):
    text = (ROOT / "configs" / "kubernetes" / f"{name}.yaml").read_text()
    assert old in text
    with pytest.raises((AssertionError, ValueError, TypeError, jsonschema.ValidationError)):
        check_manifest(yaml.safe_load(text.replace(old, new)))
