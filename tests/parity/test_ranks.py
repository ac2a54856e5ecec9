"""Gradients of two ranks against torch's own DistributedDataParallel and FSDP2, two processes over gloo, in fp32.

Ours are read off a step of plain gradient descent: (w0 - w1) / lr."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from counts import some_of
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

BIN = Path(os.environ["LM_BIN"])
VOCAB, EXAMPLES, LR = 120, 8, 4096.0  # the weight drowns in the step, not the step in the weight


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def work(request, tmp_path_factory):
    """A model, and examples whose numbers of targets differ; the last has none."""
    work = tmp_path_factory.mktemp("parity_ranks")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        max_position_embeddings=64, tie_word_embeddings=request.param, bos_token_id=1, eos_token_id=2)).save_pretrained(work / "model")
    generator = torch.Generator().manual_seed(4)
    examples = []
    for i in range(EXAMPLES):
        ids = torch.randint(0, VOCAB, (6 + 3 * i,), generator=generator).tolist()
        hidden = len(ids) if i == EXAMPLES - 1 else i
        examples.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    (work / "train.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    return work


def theirs(rank, work, kind):
    """One process of two: its examples' part of the gradients, as `kind` adds them up."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{work}/{kind}.store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(work / "model", dtype=torch.float32, attn_implementation="eager")
    names = [name for name, _ in model.named_parameters()]
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    examples = [json.loads(line) for line in open(work / "train.jsonl")]
    targets = sum(sum(label >= 0 for label in example["labels"][1:]) for example in examples)
    total = 0
    for example in examples[rank::2]:  # as many passes on both: each gathers
        logits = wrapped(input_ids=torch.tensor([example["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(example["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
    (total * 2 / targets).backward()  # both average over the processes
    out = {}
    for name, parameter in zip(names, model.parameters()):
        gradient = parameter.grad
        out[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).contiguous()
    if rank == 0:
        save_file(out, work / f"{kind}.safetensors")
    dist.barrier()
    os._exit(0)  # torch's threads may abort a process that leaves in order


@pytest.fixture(scope="module", params=some_of(0, 1))
def reference(request, work):
    """Of either way of theirs for one of the models, then of the other one."""
    tied = json.loads((work / "model" / "config.json").read_text())["tie_word_embeddings"]
    kind = ("ddp", "fsdp2")[(request.param + tied) % 2]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "support")}
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), str(work), kind], env=environment) for rank in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    return load_file(work / f"{kind}.safetensors")


def ours(work, stage, ranks):
    name = f"stage{stage}"
    (work / f"{name}.toml").write_text(f"""
[run]
device = "cpu"
threads = 1
[model]
path = "model"
dtype = "fp32"
[data]
train = ["train.jsonl"]
max_length = 64
cache_dir = "cache"
[train]
steps = 1
global_batch = {EXAMPLES}
micro_batch = 4
[optimizer]
name = "sgd"
momentum = 0.0
weight_decay = 0.0
lr = {LR}
schedule = "constant"
clip = "none"
[zero]
stage = {stage}
[checkpoint]
every = 0
""")
    subprocess.run(["rm", "-rf", work / "runs" / name], check=True)
    done = subprocess.run([BIN / "lmlaunch", "--ranks", str(ranks), f"{name}.toml"], cwd=work, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = load_file(work / "model" / "model.safetensors"), load_file(work / "runs" / name / "model" / "model.safetensors")
    return {key: (before[key].double() - after[key].double()) / LR for key in before}


@pytest.mark.parametrize("stage", [1, 3])
def test_first_gradients_are_those_of_torch(work, reference, stage):
    gradients = ours(work, stage, 2)
    worst = {name: ((gradients[name] - wanted.double()).norm() / wanted.double().norm()).item()
             for name, wanted in reference.items() if name in gradients}
    assert len(worst) == len(gradients)
    name = max(worst, key=worst.get)
    assert worst[name] <= 1e-5, f"{name}: {worst[name]:.2g}"


@pytest.mark.parametrize("ranks, stage", [(2, 1), (3, 2), (4, 3)])
def test_first_gradients_are_those_of_one_rank(work, ranks, stage):
    """Each tensor's, with other numbers of sequences and of targets on every rank."""
    one, many = ours(work, 0, 1), ours(work, stage, ranks)
    assert one.keys() == many.keys()
    worst = {name: ((many[name] - wanted).norm() / wanted.norm()).item() for name, wanted in one.items()}
    name = max(worst, key=worst.get)
    assert worst[name] <= 1e-5, f"{name}: {worst[name]:.2g}"


if __name__ == "__main__":
    theirs(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
