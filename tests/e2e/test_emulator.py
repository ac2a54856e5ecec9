"""The GPU program as its users start it, on the emulator (tests/emulator): the unchanged CLI process finds the emulator's cards, starts the real
lmlaunch-cuda, and what comes out is held against the same run on the CPU. Half of the families are trained in full here, the
other half with LoRA; `-m long` has the other halves and a real model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "parity"))
import tiny_models  # noqa: E402

BIN = Path(os.environ.get("LM_BIN", ROOT / "build" / "bin"))
EMULATOR = BIN.parent / "emulator"
STEPS = 5
H100 = "NVIDIA H100 80GB HBM3"
SHORT = ["--gpus", "1", "train.recompute=block", "train.steps=2"]
EVERYTHING = [f"offload.{name}=host" for name in ("optimizer", "weights", "gradients", "activations")]
long = pytest.mark.long


def emulator_environment(**more):
    return {**os.environ, "LD_PRELOAD": str(EMULATOR / "lib" / "libemulator_devices.so"), "LD_LIBRARY_PATH": str(EMULATOR / "lib"), **more}


def start(*arguments, cwd, on, bin=None, **variables):
    """`on`: "emulator" or "cpu"."""
    environment = emulator_environment(**variables) if on == "emulator" else {**os.environ, **variables}
    program = (bin or (EMULATOR / "bin" if on == "emulator" else BIN)) / "lmlaunch"
    return subprocess.Popen([program, *map(str, arguments)], cwd=cwd, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def finish(process, code=0):
    out, err = process.communicate(timeout=500)
    assert process.returncode == code, f"exit {process.returncode} instead of {code}\n{err}"
    return out, err


def lmlaunch(*arguments, cwd, on="emulator", code=0, **more):
    return finish(start(*arguments, cwd=cwd, on=on, **more), code)


def make_work(directory, family):
    """A tiny model and examples of 3 to 20 tokens, of which the first two are not trained."""
    work = directory / family
    vocab = tiny_models.text_config(tiny_models.make(family, work / "model")).vocab_size
    generator = torch.Generator().manual_seed(2)
    for name, count in [("train", 24), ("eval", 6)]:
        with open(work / f"{name}.jsonl", "w") as file:
            for _ in range(count):
                ids = torch.randint(4, vocab, (int(torch.randint(3, 21, (1,), generator=generator)),), generator=generator).tolist()
                file.write(json.dumps({"input_ids": ids, "labels": [-100] * 2 + ids[2:]}) + "\n")
    # eps: where a gradient is all but 0, Adam must not make a step of its rounding's sign.
    (work / "c.toml").write_text(
        'run.threads = 1\nmodel.path = "model"\nmodel.dtype = "fp32"\n'
        '[data]\ntrain = ["train.jsonl"]\nmax_length = 24\npacking = true\ncache_dir = "../cache"\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = 2\nmicro_batch = 1\nrecompute = "none"\n'
        '[optimizer]\nlr = 3e-3\nschedule = "constant"\neps = 1e-5\n')
    return work


@pytest.fixture(scope="session")
def works(tmp_path_factory):
    directory, made = tmp_path_factory.mktemp("emulator"), {}

    def work(family):
        if family not in made:
            made[family] = make_work(directory, family)
        return made[family]

    return work


@pytest.fixture(scope="session")
def work(works):
    return works("llama_three_heads_per_key_tied_with_pad_token")


def make_deep(work, tied=False):
    """Six layers: more than there are slots for weights that pass through."""
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny_models.sizes(48, 112, 6, 2), "num_hidden_layers": 6, "tie_word_embeddings": tied}))
    model.save_pretrained(work / "deep")
    return model


def rows(work, name):
    return [json.loads(line) for line in open(work / "runs" / name / "metrics.jsonl")]


def numbers(work, name):
    return [(row["loss"], row["grad_norm"]) for row in rows(work, name) if "loss" in row]


def train_on_both(work, name, *changes, steps=STEPS):
    """Both at once: each computes on one core."""
    runs = [start("c.toml", *gpus, f"run.dir=runs/{name}_{on}", *changes, cwd=work, on=on)
            for on, gpus in [("cpu", ["--gpus", "0"]), ("emulator", ["--gpus", "1"])]]
    err = [finish(run)[1] for run in runs][1]
    assert H100 in err
    cpu, emulator = numbers(work, f"{name}_cpu"), numbers(work, f"{name}_emulator")
    assert len(cpu) == steps
    return emulator, cpu


# Measured: at most 2e-6.
def expect_same_curve(emulator, cpu, rel=1e-4):
    for (loss, norm), (expected, expected_norm) in zip(emulator, cpu, strict=True):
        assert loss == pytest.approx(expected, rel=rel)
        assert norm == pytest.approx(expected_norm, rel=10 * rel)


LORA = ["train.method=lora", "lora.r=4", "lora.alpha=8", "lora.dropout=0.1", "optimizer.lr=1e-2"]
FAMILIES = [pytest.param(family, method, id=f"{family}-{method}", marks=[] if (i + (method == "lora")) % 2 == 0 else [long])
            for i, family in enumerate([*tiny_models.MODELS, *tiny_models.KERNELS]) for method in ("full", "lora")]


@pytest.mark.parametrize("family,method", FAMILIES)
def test_every_family_learns_as_on_the_cpu(works, family, method):
    work = works(family)
    expect_same_curve(*train_on_both(work, method, *(LORA if method == "lora" else [])))


def test_a_row_that_ends_a_run_leaves_the_rows_of_all_steps_before_it(work):
    """A step's row is written when the next one has begun; here there is none."""
    lines = (work / "train.jsonl").read_text().splitlines()
    (work / "bad.jsonl").write_text("\n".join((lines * 6)[:130]) + "\n{not JSON\n")
    changes = ["data.train=bad.jsonl", "data.streaming=true", "data.shuffle=false", "data.shuffle_window=16", "data.packing=false", "train.steps=20",
               "train.global_batch=16", "train.micro_batch=8"]
    for on, gpus in [("cpu", "0"), ("emulator", "1")]:
        lmlaunch("c.toml", "--gpus", gpus, f"run.dir=runs/bad_{on}", *changes, cwd=work, on=on, code=11)
    cpu, emulator = numbers(work, "bad_cpu"), numbers(work, "bad_emulator")
    assert 3 < len(cpu) < 20
    expect_same_curve(emulator, cpu)


def test_adapters_that_begin_with_what_was_lost_learn_as_on_the_cpu(work):
    """They are worked out on the host, and pass through the staging buffer on their way to the card."""
    expect_same_curve(*train_on_both(work, "loftq", *LORA[1:], "train.method=qlora", "lora.start=loftq"))


def test_adapters_that_begin_with_the_principal_parts_learn_as_on_the_cpu(work):
    """Those are frozen in the model's type beside the pairs, and joined with them on the card."""
    expect_same_curve(*train_on_both(work, "pissa", *LORA, "lora.start=pissa"))


PAIRS = ["train.method=lora", "lora.r=4", "lora.alpha=8", "optimizer.lr=1e-2"]
TIED, UNTIED = "llama_three_heads_per_key_tied_with_pad_token", "llama_every_head_its_own_keys_odd_sizes"
CHOSEN = f"lora.tokens={[*range(10, 60), 3]}"
# What is trained beside pairs, or in their place: (family, settings)
BESIDE = {
    "rows_tied": (TIED, [*PAIRS, CHOSEN]),
    "rows_untied": (UNTIED, [*PAIRS, CHOSEN, 'lora.also=["lm_head"]']),
    "whole_tied": (TIED, [*PAIRS, 'lora.also=["embed_tokens", "norms"]']),
    "whole_untied": (UNTIED, [*PAIRS, 'lora.also=["embed_tokens", "lm_head"]']),
    "pairs_of_both_matrices": (UNTIED, [*PAIRS, 'lora.targets=["q_proj", "embed_tokens", "lm_head"]']),
    "dora": (UNTIED, [*LORA, "lora.dora=true"]),
    "dora_and_rows": (TIED, [*LORA, "lora.dora=true", CHOSEN]),
    "prefix": (TIED, ["train.method=prefix", "prompt.length=5", "optimizer.lr=1e-2"]),
    "prompt": (TIED, ["train.method=prompt", "prompt.length=5", "optimizer.lr=1e-2"]),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_trained_beside_pairs_or_in_their_place_learns_as_on_the_cpu(works, name):
    family, changes = BESIDE[name]
    expect_same_curve(*train_on_both(works(family), name, *changes))


BALANCE = "train.router_aux_loss=0.5"  # so large that it is seen in every gradient
MIXTURES = {
    "pairs": [*PAIRS, "lora.experts=true"],
    "quantized": ["train.method=qlora", *PAIRS[1:], "lora.experts=true"],
    "pairs_from_the_host": [*PAIRS, "lora.experts=true", "offload.weights=host", "train.recompute=block"],
    "balanced": [BALANCE],
    "balanced_from_the_host": [BALANCE, *EVERYTHING, "train.recompute=block"],
    "balanced_at_once": [BALANCE, "train.micro_batch=2"],
    "balanced_in_backward": [BALANCE, "train.update=in_backward", "optimizer.clip=block"],
}


@pytest.mark.parametrize("name", MIXTURES)
def test_adapters_of_experts_and_balanced_routers_learn_as_on_the_cpu(works, name):
    work = works("qwen3_moe_one_dense_layer")
    expect_same_curve(*train_on_both(work, name, *MIXTURES[name]))
    cpu, emulator = ([row for row in rows(work, f"{name}_{on}") if "loss" in row] for on in ("cpu", "emulator"))
    for ours, theirs in zip(emulator, cpu, strict=True):
        for key in ("router_aux_loss", "router_entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4)
    for key in ("expert_load_max", "expert_load_min"):
        assert emulator[0][key] == pytest.approx(cpu[0][key], rel=1e-12)


def test_pairs_of_fp32_on_experts_of_bf16_learn_as_on_the_cpu(works):
    """Their products are made in fp32 copies. In bf16 a router may choose otherwise where its logits are near each other."""
    changes = ["train.method=qlora", *PAIRS[1:], "lora.experts=true", "model.dtype=bf16", "lora.dtype=fp32"]
    expect_same_curve(*train_on_both(works("qwen3_moe_one_dense_layer"), "fp32_pairs", *changes), rel=2e-2)


@pytest.mark.parametrize("name", ["rows_untied", "pairs_of_both_matrices", "rows_tied"])
def test_rows_of_an_embedding_that_the_gpu_reads_in_place_are_trained_with_the_same_bits(works, name):
    """An untied table is in host memory then; a trained row is written where it lies there."""
    family, changes = BESIDE[name]
    work = works(family)
    for place, more in (("here", []), ("there", EVERYTHING)):
        lmlaunch("c.toml", *SHORT, f"run.dir=runs/{name}_{place}", *changes, *more, cwd=work)
    assert numbers(work, f"{name}_there") == numbers(work, f"{name}_here")
    results = [json.loads(lmlaunch("verify", f"runs/{name}_{place}/model", "--json", cwd=work, on="cpu")[0])["weights_hash"] for place in ("here", "there")]
    assert results[0] == results[1]


def test_what_a_run_made_is_the_same_for_every_command(work):
    """Trained on the emulator; evaluated, verified and exported on both."""
    lmlaunch("c.toml", "--gpus", "1", "run.dir=runs/made", *LORA, 'data.eval=["eval.jsonl"]', cwd=work)
    results = {}
    for on, gpus in [("emulator", ["--gpus", "1"]), ("cpu", ["--gpus", "0"])]:
        result = json.loads(lmlaunch("eval", "runs/made", "--json", *gpus, cwd=work, on=on)[0])
        verified = json.loads(lmlaunch("verify", "runs/made", "--json", cwd=work, on=on)[0])
        lmlaunch("export", "runs/made", "-o", f"merged_{on}", "--merge", cwd=work, on=on)
        merged = (work / f"merged_{on}" / "model.safetensors").read_bytes()
        results[on] = result["eval_loss"], verified["weights_hash"], merged
    trained = [row["eval_loss"] for row in rows(work, "made") if "eval_loss" in row][-1]
    assert results["emulator"][0] == pytest.approx(trained, rel=1e-6)
    assert results["emulator"][0] == pytest.approx(results["cpu"][0], rel=1e-5)
    assert results["emulator"][1:] == results["cpu"][1:]


def test_a_stop_signal_finishes_the_step_and_exits_75(work):
    process = start("c.toml", "--gpus", "1", "run.dir=runs/stopped", "train.steps=100000", cwd=work, on="emulator")
    status = work / "runs" / "stopped" / "status.json"
    while process.poll() is None and not (status.exists() and json.loads(status.read_text())["step"] >= 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = finish(process, code=75)
    assert "reason=signal:SIGINT" in err.rstrip().splitlines()[-1]
    assert json.loads(status.read_text())["state"] == "stopped"



@pytest.fixture(scope="session")
def resident(work):
    lmlaunch("c.toml", *SHORT, "run.dir=runs/resident", cwd=work)
    return numbers(work, "resident")


def test_an_offloaded_run_repeats_the_resident_one(work, resident):
    lmlaunch("c.toml", *SHORT, "run.dir=runs/offloaded", *EVERYTHING, cwd=work)
    assert numbers(work, "offloaded") == resident


def test_rows_have_the_bytes_that_crossed_the_link(work):
    """Of a steady step as many as planned, of weights that are more than there are slots. (A tied embedding stays on the GPU; from
    another one the GPU reads rows in place, which is no copy.)"""
    make_deep(work, tied=True)
    lmlaunch("c.toml", "--gpus", "1", "run.dir=runs/link", "model.path=deep", "train.recompute=block", "offload.weights=host", cwd=work)
    planned = next(link["amount"] for link in json.loads((work / "runs" / "link" / "plan.json").read_text())["links"] if link["name"] == "GPU link")
    for row in [row for row in rows(work, "link") if "loss" in row][2:]:
        assert row["to_device_bytes"] > 0 and row["from_device_bytes"] > 0
        assert row["to_device_bytes"] + row["from_device_bytes"] == pytest.approx(planned, rel=0.01)


def test_where_pinning_is_refused_the_run_goes_on_and_says_so(work, resident):
    _, err = lmlaunch("c.toml", *SHORT, "run.dir=runs/unpinned", *EVERYTHING, cwd=work, EMULATOR_NO_PIN="1")
    assert numbers(work, "unpinned") == resident
    assert "warning MEM-17" in err and "could not be locked" in err, err


# An untied embedding whose weights are off the device is looked up by the GPU where it lies.
def test_memory_that_the_gpu_must_reach_and_that_cannot_be_pinned_ends_with_31(works):
    work = works("llama_every_head_its_own_keys_odd_sizes")
    _, err = lmlaunch("c.toml", *SHORT, "run.dir=runs/pinned", "offload.weights=host", cwd=work, code=31, EMULATOR_NO_PIN="1")
    assert "the GPU cannot use locked host memory" in err and "memlock" in err, err


def test_where_kernels_do_not_reach_host_memory_sums_are_copied_and_what_is_read_in_place_is_refused(work, resident, works):
    lmlaunch("c.toml", *SHORT, "run.dir=runs/other_addresses", *EVERYTHING, cwd=work, EMULATOR_NO_HOST_ADDRESS="1")
    assert numbers(work, "other_addresses") == resident
    untied = works("llama_every_head_its_own_keys_odd_sizes")
    _, err = lmlaunch("c.toml", *SHORT, "run.dir=runs/pinned", "offload.weights=host", cwd=untied, code=31, EMULATOR_NO_HOST_ADDRESS="1")
    assert "kernels on this system do not reach it by its address" in err and "memlock" not in err, err


# ---- what goes wrong ends with a message and its code


def refused(work, code, *words, **more):
    shutil.rmtree(work / "runs" / "refused", ignore_errors=True)
    _, err = lmlaunch("c.toml", "--gpus", "1", "run.dir=runs/refused", cwd=work, code=code, **more)
    assert not (work / "runs" / "refused" / "model").exists()
    for word in words:
        assert word in err, err
    return err


def test_a_card_too_small_is_refused_by_the_plan(work):
    refused(work, 12, "does not fit", EMULATOR_GPUS=H100 + ":0.05")


def test_a_card_without_code_or_bf16_is_refused_by_name_before_the_model_is_loaded(work):
    refused(work, 12, "Tesla T4 has compute capability 7.5, and lmlaunch-cuda holds code for", "--gpus 0", EMULATOR_GPUS="Tesla T4:16:7.5")
    refused(work, 12, "Tesla V100 has compute capability 7.0: GPUs can train from 7.5 on", "--gpus 0", EMULATOR_GPUS="Tesla V100:16:7.0")
    refused(work, 12, "NVIDIA A10 has compute capability 8.6, and lmlaunch-cuda holds code for", EMULATOR_GPUS="NVIDIA A10:24:8.6")
    _, err = lmlaunch("c.toml", "--gpus", "1", "run.dir=runs/newer", "train.steps=1", cwd=work, EMULATOR_GPUS="NVIDIA GeForce RTX 5090:32:12.0")
    assert "computing on NVIDIA GeForce RTX 5090" in err and "compute capability 12.0" in err, err


def test_a_card_that_another_program_fills_meanwhile_ends_with_30(work):
    err = refused(work, 30, "GPU memory", EMULATOR_TAKEN="79.9995")
    assert "code=30" in err.rstrip().splitlines()[-1]


def test_two_cards_that_are_numbered_differently_are_the_same_card(work):
    for name, order, expected in [("pci", {}, "NVIDIA A10"), ("fastest", {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, H100),
                                  ("chosen", {"CUDA_VISIBLE_DEVICES": "1"}, H100)]:
        _, err = lmlaunch("c.toml", "--gpus", "1", f"run.dir=runs/{name}", "train.steps=1", cwd=work,
                          EMULATOR_GPUS=f"NVIDIA A10:24,{H100}:80", **order)
        other = H100 if expected == "NVIDIA A10" else "NVIDIA A10"
        assert expected in err and other not in err, err
        planned = (work / "runs" / name / "plan.txt").read_text()
        allowed = "72.00 GiB" if expected == H100 else "21.60 GiB"
        assert allowed in planned, planned


@pytest.mark.parametrize("state", ["absent", "empty"])
def test_without_nvml_a_run_is_planned_with_cudas_own_figures(work, state):
    _, err = lmlaunch("c.toml", "--gpus", "1", f"run.dir=runs/{state}", "train.steps=1", cwd=work, EMULATOR_NVML=state)
    assert "note GPU-34: NVML" in err and "72.00 GiB may be used" in err, err


def test_a_variable_that_hides_every_card_is_named(work):
    refused(work, 12, "CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES="")


# ---- a real model


@long
def test_smollm2_learns_and_answers_as_on_the_cpu(tmp_path):
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    model, quickstart = cache / "lmlaunch" / "models" / "smollm2-135m-instruct", tmp_path / "build" / "quickstart"
    quickstart.mkdir(parents=True)
    (quickstart / "model").symlink_to(model)
    for command in (["make_model.py", model], ["make_data.py", model, quickstart]):
        subprocess.run([sys.executable, ROOT / "configs" / "quickstart" / command[0], *command[1:]], check=True)
    shutil.copy(ROOT / "configs" / "quickstart.toml", tmp_path / "c.toml")
    emulator, cpu = train_on_both(tmp_path, "real", "run.device=auto", "data.cache_dir=cache", "data.eval=[]", "train.epochs=auto",
                              "train.steps=3", "optimizer.warmup=0", steps=3)
    # Two bf16 runs of 30 layers lie on either side of the fp32 loss: the first step's are 3.0341 and 3.0298 around 3.0322.
    for (loss, norm), (expected, expected_norm) in zip(emulator, cpu, strict=True):
        assert loss == pytest.approx(expected, abs=0.01)
        assert norm == pytest.approx(expected_norm, rel=0.05)
    answers = [json.loads(lmlaunch("generate", "runs/real_emulator", "--prompt", "What is Python?", "--max-tokens", "6", "--json", *gpus,
                                   cwd=tmp_path, on=on)[0])["text"]
               for on, gpus in [("emulator", ["--gpus", "1"]), ("cpu", ["--gpus", "0"])]]
    assert answers[0] == answers[1]


def damage_in_memory(process, bytes_):
    """Stops the rank that `process` has started, changes a bit wherever it has these bytes, and lets it go on. How often that was."""
    rank = int(subprocess.run(["pgrep", "-P", str(process.pid), "lmlaunch"], capture_output=True, text=True).stdout.split()[0])
    os.kill(rank, signal.SIGSTOP)
    count = 0
    with open(f"/proc/{rank}/maps") as maps, open(f"/proc/{rank}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            place, rights, _, _, inode = line.split()[:5]
            if not rights.startswith("rw") or inode != "0":
                continue
            begin, end = (int(part, 16) for part in place.split("-"))
            try:
                memory.seek(begin)
                held = memory.read(end - begin)
            except OSError:  # what nothing may read: the emulator's guards
                continue
            at = held.find(bytes_)
            while at >= 0:
                memory.seek(begin + at)
                memory.write(bytes([bytes_[0] ^ 4]))
                count += 1
                at = held.find(bytes_, at + 1)
    os.kill(rank, signal.SIGCONT)
    return count


def test_damage_in_host_memory_ends_the_run(work):
    """Frozen weights that live there, of more layers than there are slots, changed from outside: known bytes, wherever they are."""
    model = make_deep(work)
    known = model.model.layers[1].mlp.down_proj.weight.detach().numpy().tobytes()[:256]
    process = start("c.toml", "model.path=deep", "train.method=lora", "offload.weights=host", "train.steps=1000", "run.dir=runs/damaged",
                    cwd=work, on="emulator")
    metrics = work / "runs" / "damaged" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and '"step":3,' in metrics.read_text()):
        time.sleep(0.01)
    assert damage_in_memory(process, known) > 0
    _, err = finish(process, code=22)
    assert "weights of " in err and "are not what was written there" in err and "at host memory" in err, err
