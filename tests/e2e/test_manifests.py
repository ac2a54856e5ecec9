"""The manifests of configs/kubernetes, by assertions: what the cluster's schemas ask for, and that they say what lmlaunch does
(exit codes, keys, ports, GPUs). No cluster is needed."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs" / "kubernetes").glob("*.yaml"))}
KEYS = set(re.findall(r"^\| `(\w+\.\w+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.M))
FLAGS = (ROOT / "launcher" / "command_table.cpp").read_text()
CODES = {int(code) for code in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)}


def pods(manifest):
    """The templates of a manifest's pods, by name."""
    spec = manifest["spec"]
    if manifest["kind"] == "MPIJob":
        return {name: replica["template"] for name, replica in spec["mpiReplicaSpecs"].items()}
    return {job["name"]: job["template"]["spec"]["template"] for job in spec["replicatedJobs"]} if manifest["kind"] == "JobSet" else {"": spec["template"]}


def job_specs():
    return [MANIFESTS["job"]["spec"], *(job["template"]["spec"] for job in MANIFESTS["jobset"]["spec"]["replicatedJobs"])]


def test_each_has_its_kind():
    assert {name: (one["apiVersion"], one["kind"]) for name, one in MANIFESTS.items()} == {
        "job": ("batch/v1", "Job"), "jobset": ("jobset.x-k8s.io/v1alpha2", "JobSet"), "mpijob": ("kubeflow.org/v2beta1", "MPIJob")}


def test_a_jobset_has_the_job():
    assert [{key: spec[key] for key in ("backoffLimit", "podFailurePolicy", "template")} for spec in job_specs()[1:]] == [MANIFESTS["job"]["spec"]]
    policy = MANIFESTS["jobset"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0 and [rule["action"] for rule in policy["rules"]] == ["FailJobSet"]


@pytest.mark.parametrize("spec", job_specs(), ids=["job", "jobset"])
def test_exit_codes_decide_what_follows(spec):
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    rules = spec["podFailurePolicy"]["rules"]
    assert all(("onExitCodes" in rule) != ("onPodConditions" in rule) for rule in rules)
    by_code = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert (by_code["Ignore"]["operator"], by_code["Ignore"]["values"]) == ("In", [75])
    assert by_code["FailJob"]["operator"] == "NotIn"
    again = by_code["FailJob"]["values"]
    # Stopped on request, a lost rank, a hanging one; and the container's kill, which is no code of ours. In order, each once.
    assert {40, 41, 75} == set(again) & CODES and set(again) - CODES == {137} and again == sorted(set(again))
    names = {container["name"] for container in spec["template"]["spec"]["containers"]}
    assert all(codes["containerName"] in names for codes in by_code.values())


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_a_pod_mounts_and_runs_exists(name):
    for template in pods(MANIFESTS[name]).values():
        spec = template["spec"]
        assert spec["terminationGracePeriodSeconds"] >= 300  # the default, 30 s, is too short for a save
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == volumes
            words = container.get("args", [])
            assert {word.split("=")[0] for word in words if "=" in word} <= KEYS
            assert all(f'"{word}"' in FLAGS for word in words if word.startswith("--"))
            gpus = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu")
            if "--gpus" in words:
                assert int(words[words.index("--gpus") + 1]) == gpus
            if gpus:  # NCCL's, of GPUs that cannot reach each other
                assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
            for word in words:
                if word.startswith("log.prometheus="):
                    port = int(word.rsplit(":", 1)[1])
                    assert [one["containerPort"] for one in container["ports"]] == [port]
                    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(port)


def test_an_mpijob_has_as_many_ranks_as_gpus():
    spec = MANIFESTS["mpijob"]["spec"]
    workers = spec["mpiReplicaSpecs"]["Worker"]
    launcher = pods(MANIFESTS["mpijob"])["Launcher"]["spec"]["containers"][0]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    command = launcher["command"]
    assert command[0] == "mpirun" and int(command[command.index("-n") + 1]) == workers["replicas"] * gpus and gpus == spec["slotsPerWorker"]
    # mpirun's own second after TERM is too short for a save.
    grace = pods(MANIFESTS["mpijob"])["Launcher"]["spec"]["terminationGracePeriodSeconds"]
    assert int(command[command.index("odls_base_sigkill_timeout") + 1]) <= grace
