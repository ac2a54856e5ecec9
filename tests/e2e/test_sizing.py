"""`lmlaunch plan` for choosing machines: what it prints has the schema of docs/plan.schema.json, `--machine` plans for what `doctor` has
described, and one more disk, network adapter or memory does what a plan with it says. No GPU, model or data is needed."""

import copy
import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

from test_run import BIN, config, filled, lmlaunch

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "plan.schema.json").read_text())
CHECK = jsonschema.Draft202012Validator(SCHEMA)
FULL, QLORA, SMALL = "llama-3.1-8b-full-24gib", "qwen3-8b-qlora-12gb", "smollm2-135m-lora"
H100S = ["--gpus", "64", "--nodes", "8", "--gpu", "H100", "--host-memory", "2000GiB", "train.global_batch=64"]


def called(*arguments, cwd=None):
    return subprocess.run([BIN / "lmlaunch", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env={"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"})


def plan(*arguments, codes=(0,), cwd=None):
    done = called("plan", *arguments, "--json", cwd=cwd)
    assert done.returncode in codes, done.stderr
    found = json.loads(done.stdout)
    errors = sorted(CHECK.iter_errors(found), key=lambda error: len(error.absolute_path))
    # Of a choice among three, the reason why a plan is none.
    assert not errors, [error.message for error in jsonschema.Draft202012Validator({**SCHEMA, "oneOf": [{"$ref": "#/$defs/plan"}]}).iter_errors(found)][:3]
    return found


def objects(schema):
    if isinstance(schema, dict):
        yield schema
        for inner in schema.values():
            yield from objects(inner)
    if isinstance(schema, list):
        for inner in schema:
            yield from objects(inner)


def test_the_schema_describes_every_property_and_allows_no_other():
    CHECK.check_schema(SCHEMA)
    described = {f"#/$defs/{name}" for name, one in SCHEMA["$defs"].items() if one["description"]}
    for one in objects(SCHEMA):
        if one.get("type") == "object" and "properties" in one:
            assert one["additionalProperties"] is False and set(one["required"]) <= set(one["properties"])
            for name, value in one["properties"].items():
                assert value.get("description") or value.get("$ref") in described, name
                assert value.keys() & {"type", "enum", "const", "$ref"}, name


@pytest.mark.parametrize("arguments", [
    (FULL, "--gpus", "0", "--host-memory", "256GiB", "run.device=cpu"),
    (FULL, "--gpu-memory", "24GiB", "--host-memory", "64GiB"),
    (FULL, *H100S, "zero.stage=3"),
    (FULL, *H100S, "zero.stage=3", "zero.group=machine", "train.micro_batch=1", "offload.optimizer=none", "offload.weights=none"),
    (FULL, *H100S, "zero.stage=3", "offload.optimizer=nvme", "offload.weights=nvme", "offload.gradients=nvme", 'offload.paths=["."]'),
    (FULL, "--gpu", "RTX-4090", "--host-memory", "256GiB", "train.update=in_backward", "train.recompute=attention"),
    (FULL, "--ranks", "2", "--host-memory", "512GiB", "run.device=cpu", "zero.stage=2", "train.global_batch=4", "optimizer.name=muon"),
    (QLORA, "--gpu", "T4", "--host-memory", "64GB", "model.dtype=fp16", "train.loss_scale=65536"),
    (QLORA, "--gpu", "RTX-4090", "--host-memory", "64GB", "model.dtype=fp32", "model.products=tf32", "train.method=lora", "model.quantize=none"),
    (QLORA, "--gpu", "RTX-4090", "--host-memory", "64GB", "data.streaming=true", "data.eval_fraction=0", "train.steps=10"),
], ids=["cpu", "offload", "shards", "machine", "disks", "in_backward", "ranks", "fp16", "tf32", "streaming"])
def test_plans_have_the_schema(arguments):
    assert plan(*arguments, codes=(0, 12))["placement"]["device"]


def test_so_have_refusals_comparisons_and_a_runs_plan(tmp_path):
    refused = plan(FULL, "--gpu-memory", "1GiB", "--host-memory", "1GiB", codes=(12,))
    assert not refused["fits"] and refused["why"] and all(row["speedup"] is None for row in refused["upgrades"])
    assert isinstance(plan("--compare", QLORA, "--gpu-memory", "24GiB", "--host-memory", "64GiB"), list)
    work = filled(tmp_path, layers=2)
    lmlaunch(config(work, "tiny", train__steps=1, train__eval_every=0), cwd=work)
    CHECK.validate(json.loads((work / "runs" / "tiny" / "plan.json").read_text()))


def test_a_key_without_a_row_is_found():
    found = plan(FULL, *H100S)
    for place in ([], ["peak"], ["tiers", 0], ["numerics"], ["placement"], ["traffic"], ["scaling", "rows", 0], ["upgrades", 0]):
        wrong = copy.deepcopy(found)
        inner = wrong
        for key in place:
            inner = inner[key]
        inner["news"] = 1
        assert not CHECK.is_valid(wrong), place
    assert not CHECK.is_valid({key: value for key, value in found.items() if key != "binding"})


# --- machines of files


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    work = tmp_path_factory.mktemp("machine")
    done = called("doctor", "--json", cwd=work)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


GPU = {"name": "H200", "memory_bytes": 141_000_000_000, "bf16_flops": 989.4e12, "fp32_flops": 66.9e12, "bandwidth": 4800e9, "free_bytes": 1,
       "link_bandwidth": 0, "processors": 132, "peer_bandwidth": 360e9, "capability": {"major": 9, "minor": 0}}


@pytest.fixture
def written(described, tmp_path):
    """Writes a changed description; its path."""
    def write(**changes):
        (tmp_path / "machine.json").write_text(json.dumps({**described, "machine": {**described["machine"], **changes}}))
        return tmp_path / "machine.json"
    return write


ESTIMATE = ("fits", "peak", "step_seconds", "tokens_per_s", "binding", "tiers", "links", "numerics", "placement", "scaling", "traffic")


def estimate(found):
    return {key: found[key] for key in ESTIMATE if key in found}


def test_a_plan_for_the_described_machine_is_the_plan_on_it(described, written):
    assert described["machine"]["cores"] > 0 and described["machine"]["disks"][0]["read_bandwidth"] > 0
    file = written(host_memory=64 << 30, host_limit=0, host_available=1)  # idle, whatever ran there
    found = plan(SMALL, "--gpus", "0", "--machine", file)
    assert estimate(found) == estimate(plan(SMALL, "--gpus", "0", "--host-memory", "64GiB"))
    assert str(file) in found["assumptions"][0] and "nothing else running" in found["assumptions"][0]
    assert str(file) in called("plan", SMALL, "--gpus", "0", "--machine", file).stdout


def test_its_gpus_are_those_of_each_machine(written):
    file = written(host_memory=2000 << 30, host_limit=0, gpus=[GPU] * 8)
    several = ["train.global_batch=64", "zero.stage=3"]
    found = plan(FULL, "--gpus", "16", "--machine", file, *several)
    assert (found["ranks"], found["nodes"], found["gpu"]["name"]) == (16, 2, "H200")
    assert estimate(found) == estimate(plan(FULL, "--gpus", "16", "--nodes", "2", "--gpu", "H200", "--host-memory", "2000GiB", *several))
    crowded = called("plan", FULL, "--gpus", "16", "--nodes", "1", "--machine", file, *several)
    assert crowded.returncode == 2 and "has 8" in crowded.stderr
    assert plan(FULL, "--machine", written(gpus=[GPU], host_memory=2000 << 30, host_limit=0))["placement"]["device"] == "cuda"
    slower = plan(FULL, "--gpus", "16", "--machine", written(host_memory=2000 << 30, host_limit=0, gpus=[{**GPU, "bf16_flops": 400e12}] * 8), *several)
    assert slower["step_seconds"] > 1.5 * found["step_seconds"]
    other = plan(SMALL, "--gpu", "H100", "--host-memory", "64GiB", "--machine", file)["assumptions"]
    assert "8 x H200, but 64.00 GiB of memory" in other[0] and any(sentence.startswith("H100: ") for sentence in other)
    cpu = called("plan", SMALL, "--machine", written(gpus=[])).stderr
    assert "has no GPU: using the CPU" in cpu and "/dev/nvidia0" not in cpu
    none = called("plan", FULL, "--gpus", "2", "--machine", written(gpus=[]))
    assert none.returncode == 2 and "has no GPU" in none.stderr


def test_its_disks_are_those_of_the_paths(written):
    disk = {"path": "/swap", "free_bytes": 1 << 42, "read_bandwidth": 1e9, "write_bandwidth": 5e8, "both_bandwidth": 1e9}
    file = written(host_memory=64 << 30, host_limit=0, gpus=[GPU], disks=[disk])
    settings = ["offload.optimizer=nvme", 'offload.paths=["/nvme"]']
    found = plan(FULL, "--machine", file, *settings)
    rates = {link["name"]: link["amount"] / link["seconds"] for link in found["links"]}
    assert rates["disk read"] == pytest.approx(1e9) and rates["disk write"] == pytest.approx(5e8)
    assert not any("disks" in sentence and "not measured" in sentence for sentence in found["assumptions"])
    more = next(row for row in found["upgrades"] if row["change"] == "one more disk")
    both = plan(FULL, "--machine", written(host_memory=64 << 30, host_limit=0, gpus=[GPU], disks=[disk, {**disk, "path": "/two"}]),
                settings[0], 'offload.paths=["/nvme", "/two"]')
    assert more["tokens_per_s"] == pytest.approx(both["tokens_per_s"], rel=0.01) and more["speedup"] > 1.5
    few = called("plan", FULL, "--machine", written(gpus=[GPU], disks=[disk]), settings[0], 'offload.paths=["/a", "/b"]')
    assert few.returncode == 2 and "names 2 directories" in few.stderr and "--path" in few.stderr


@pytest.mark.parametrize("wrong, why", [
    ({"cores": -1}, "cores"), ({"cores": 0}, "cores"), ({"host_memory": 0}, "host_memory"), ({"instructions": "mmx"}, "mmx"), ({"network_bandwidth": 1e30}, "network_bandwidth"),
    ({"gpus": [{**GPU, "memory_bytes": 0}]}, "memory_bytes"), ({"gpus": [{"name": "H200"}]}, "memory_bytes"), ({"disks": "none"}, "disks"), ({"host_memory": "64GiB"}, "")])
def test_a_file_that_describes_no_machine_is_refused(written, wrong, why):
    done = called("plan", FULL, "--machine", written(**wrong))
    assert done.returncode == 11 and "does not describe a machine" in done.stderr and "doctor --json" in done.stderr, done.stderr
    assert why in done.stderr or why == "disks"


def test_a_file_of_something_else_is_refused(described, tmp_path):
    path = tmp_path / "machine.json"
    for text in (json.dumps({"checks": described["checks"]}), "[]", "{", json.dumps({"machine": {k: v for k, v in described["machine"].items() if k != "cores"}})):
        path.write_text(text)
        assert called("plan", FULL, "--machine", path).returncode == 11, text[:40]
    assert called("plan", FULL, "--machine", tmp_path / "none.json").returncode == 11


# --- what it says


def change(found, name):
    return next(row for row in found["upgrades"] if row["change"] == name)


def test_each_change_is_the_plan_for_that_machine():
    settings = [FULL, *H100S, "zero.stage=3"]
    found = plan(*settings, "--node-link", "5GB")
    assert found["binding"] == "between machines"
    adapter = change(found, "a second network adapter")
    assert adapter["step_seconds"] == plan(*settings, "--node-link", "10GB")["step_seconds"] and adapter["speedup"] > 1.5
    one = [FULL, "--gpu", "RTX-4090", "--host-memory", "200GB"]
    assert change(plan(*one), "twice the GPU memory")["step_seconds"] == plan(*one, "--gpu-memory", "48GB")["step_seconds"]
    assert change(plan(*one), "twice the host memory")["step_seconds"] == plan(FULL, "--gpu", "RTX-4090", "--host-memory", "400GB")["step_seconds"]
    assert {row["change"] for row in plan(*one)["upgrades"]} == {"twice the GPU memory", "twice the host memory"}


def test_the_text_has_what_binds_what_would_change_it_and_what_is_assumed():
    said = called("plan", FULL, *H100S, "zero.stage=3").stdout
    section = said[said.index("what binds"):]
    found = plan(FULL, *H100S, "zero.stage=3")
    assert section.splitlines()[1].split("  ")[1] == found["binding"]
    assert all(row["change"] in section for row in found["upgrades"])
    assert all(f"  {sentence}\n" in section[section.index("\nassumed\n"):] for sentence in found["assumptions"])
    assert any("machine to machine 45 GB/s" in sentence and "not measured" in sentence for sentence in found["assumptions"])


LARGE = ["model.path=meta-llama/Llama-3.1-70B", "offload.paths=[]"]  # some rows do not fit, or none does


@pytest.mark.parametrize("memory, host, more", [("7GB", "64GB", []), ("12GB", "256GB", []), ("24GB", "64GB", []), ("80GB", "2000GiB", LARGE), ("24GB", "64GB", LARGE)])
def test_no_row_contradicts_its_headline(memory, host, more):
    arguments = [FULL, "--gpus", "16", "--nodes", "2", "--gpu-memory", memory, "--host-memory", host, "train.global_batch=16", "zero.stage=3", *more]
    found = plan(*arguments, codes=(0, 12))
    said = called("plan", *arguments).stdout
    rows = {row["ranks"]: row for row in found["scaling"]["rows"]}
    fitting = [ranks for ranks, row in rows.items() if row["fits"]]
    assert found["scaling"]["fewest_ranks"] == min(fitting, default=0)
    if " or more\n" in said:
        assert all(row["fits"] for ranks, row in rows.items() if ranks >= min(fitting))
    elif "of these\n" in said and fitting:
        assert f"fits on {', '.join(map(str, fitting))} GPUs, of these" in said
    # The row of all ranks is the plan above the table.
    assert rows[16]["fits"] == found["fits"] and (not found["fits"] or rows[16]["step_seconds"] == pytest.approx(found["step_seconds"]))
    # What is in host memory beside buffers and libraries is offloaded.
    state = {"weights", "frozen weights", "gradients", "first moment", "second moment", "master", "activations", "embedding"}
    away = [row["name"] for tier in found["tiers"] if tier["name"] != "device" for row in tier["classes"] if row["name"] in state and row["bytes"] > 0]
    assert not found["fits"] or ("plan: offloaded state" in said) == bool(away), said
    assert all(pool["home"] == "device" for pool in found["placement"]["pools"].values()) or away
