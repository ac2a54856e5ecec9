"""The manifests of configs/kubernetes and the scripts of configs/slurm say what lmlaunch does (exit codes, keys, ports, GPUs); scripts run
with stand-ins for srun, squeue and scontrol. No cluster is needed. (The types of manifests: test_manifest_types.py.)"""

import os
import re
import subprocess
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


# --- Slurm

SCRIPTS = {path.stem: path for path in sorted((ROOT / "configs" / "slurm").glob("*.sbatch"))}


def options(script):
    return dict(re.fullmatch(r"#SBATCH --([\w-]+)(?:=(.*))?", line).groups() for line in script.read_text().splitlines() if line.startswith("#SBATCH"))


def test_there_are_scripts_for_processes_gpus_and_sweeps():
    assert set(SCRIPTS) == {"train", "gpus", "sweep"}
    gpus, sweep = options(SCRIPTS["gpus"]), options(SCRIPTS["sweep"])
    for asked in (gpus, sweep):
        assert {"gres", "cpus-per-task", "mem", "time", "signal", "requeue"} <= asked.keys()
    assert gpus["gres"] == f"gpu:{gpus['ntasks-per-node']}" and gpus["distribution"] == "block" and sweep["gres"] == "gpu:1"
    assert re.fullmatch(r"0-\d+%\d+", sweep["array"])


def test_the_scripts_go_into_the_queue_again_alike():
    tails = {script.read_text().split("\ncode=$?\n")[1] for script in SCRIPTS.values()}
    assert len(tails) == 1


def run_script(tmp_path, name, code, restarts=0, array=None, venv=None):
    """With stand-ins for Slurm's programs and lmlaunch's; its exit code, and what they were called with."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for tool, body in {"srun": f"exit {code}", "squeue": "echo RUNNING", "scontrol": ":"}.items():
        (tools / tool).write_text(f'#!/bin/bash\necho {tool} "$@" >> {tmp_path}/calls\n{body}\n')
        (tools / tool).chmod(0o755)
    (tmp_path / "calls").write_text("")
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "SLURM_CPUS_PER_TASK": "12"}
    environment |= {"SLURM_ARRAY_TASK_ID": str(array)} if array is not None else {}
    environment |= {"LMLAUNCH_VENV": str(venv)} if venv else {}
    done = subprocess.run(["bash", SCRIPTS[name], "my.toml", "train.steps=9"], env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, (tmp_path / "calls").read_text().splitlines(), done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("code, restarts, again", [(0, 0, False), (75, 9, True), (40, 4, True), (41, 0, True), (40, 5, False), (12, 0, False)])
def test_a_script_goes_into_the_queue_again_by_the_exit_code(tmp_path, name, code, restarts, again):
    ended, calls, _ = run_script(tmp_path, name, code, restarts, array=0)
    assert ended == code and ("scontrol requeue 7" in calls) == again
    assert " lmlaunch my.toml train.steps=9" in calls[0]


def test_gpus_have_their_cores_and_the_environment_is_activated(tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("echo activated\n")
    for name in ("gpus", "sweep"):
        _, calls, out = run_script(tmp_path, name, 0, array=0, venv=tmp_path / "venv")
        assert "--cpus-per-task=12" in calls[0] and "activated" in out


def test_each_job_of_a_sweep_has_its_own_rate_and_directory(tmp_path):
    tasks = range(int(re.match(r"0-(\d+)", options(SCRIPTS["sweep"])["array"])[1]) + 1)
    called = [run_script(tmp_path, "sweep", 0, array=task)[1][0] for task in tasks]
    rates = [re.search(r"optimizer\.lr=(\S+) run\.dir=runs/sweep-(\S+)$", call).groups() for call in called]
    assert all(float(rate) > 0 and rate == directory for rate, directory in rates) and len(set(rates)) == len(tasks)
    assert {"optimizer.lr", "run.dir"} <= KEYS


def test_the_image_for_several_machines_has_open_mpi_pmix_and_ssh():
    text = (ROOT / "packaging" / "Containerfile.mpi").read_text()
    lines = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    kinds = [kind for kind, _ in lines]
    assert kinds[0] == "FROM" and kinds[-1] == "ENTRYPOINT" and kinds.count("FROM") == 1
    assert f"FROM {lines[0][1]}\n" in (ROOT / "packaging" / "Containerfile").read_text()  # whose Python and C library are tested
    installed = next(words for kind, words in lines if kind == "RUN" and "apt-get install" in words).split()
    assert {"openmpi-bin", "libpmix2", "openssh-server"} <= set(installed)
    plugin = re.search(r"OUTPUT_NAME (\S+)", (ROOT / "comm" / "CMakeLists.txt").read_text())[1] + ".so"
    assert ["COPY", f"{plugin} /tmp/"] in lines and any(kind == "RUN" and f"/tmp/{plugin}" in words and "/bin/" in words for kind, words in lines)
    # The manifest that names it starts what the image has.
    launcher = pods(MANIFESTS["mpijob"])["Launcher"]["spec"]["containers"][0]
    worker = pods(MANIFESTS["mpijob"])["Worker"]["spec"]["containers"][0]
    assert launcher["image"] == worker["image"] == re.search(r"docker build -f packaging/Containerfile.mpi -t (\S+)", text)[1]
    assert launcher["command"][0] == "mpirun" and worker["command"][0] == "/usr/sbin/sshd"
