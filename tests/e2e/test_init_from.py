"""`lmlaunch init --from FILE`: configurations of other trainers, with their keys and of our own making. Every key is carried over or
named with a reason, and what comes out plans."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from test_run import lmlaunch

ROOT = Path(__file__).resolve().parents[2]

AXOLOTL = """\
base_model: HuggingFaceTB/SmolLM2-135M
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
load_in_4bit: true
adapter: qlora
datasets:
  - path: my-org/my-chats
    type: chat_template
    split: train
    field_messages: messages
    message_property_mappings: {role: role, content: content}
  - path: json
    ds_type: json
    data_files: [more.jsonl]
    type: chat_template
val_set_size: 0.05
sequence_len: 1024
sample_packing: true
eval_sample_packing: false
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_model_dir:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 10
weight_decay: 0.0
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
flash_attention: true
logging_steps: 1
evals_per_epoch: 4
saves_per_epoch: 1
early_stopping_patience:
resume_from_checkpoint:
wandb_project:
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
special_tokens: {pad_token: "<|end|>"}
output_dir: ./out/axolotl
"""

FACTORY = """\
### model
model_name_or_path: HuggingFaceTB/SmolLM2-135M
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
use_dora: true
use_galore: true
dataset: identity,my_demo
template: llama3
cutoff_len: 512
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
eval_strategy: steps
eval_steps: 500
flash_attn: fa2
"""

TORCHTUNE = """\
output_dir: /tmp/tune/run
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  apply_lora_to_output: false
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/model/original/tokenizer.model
  max_seq_len: 256
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: HuggingFaceTB/SmolLM2-135M
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3_2
resume_from_checkpoint: false
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: false
seed: null
shuffle: true
batch_size: 2
gradient_accumulation_steps: 4
epochs: 2
max_steps_per_epoch: 100
optimizer:
  _component_: torch.optim.AdamW
  fused: true
  lr: 3e-4
  weight_decay: 0.01
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 20
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
clip_grad_norm: null
compile: false
device: cuda
dtype: bf16
enable_activation_checkpointing: true
enable_activation_offloading: false
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: false}
"""

# SFTConfig as it writes itself.
SFT = json.dumps({
    "model_name_or_path": "HuggingFaceTB/SmolLM2-135M", "dataset_name": "my-org/my-data", "output_dir": "out", "max_length": 512,
    "packing": True, "padding_free": False, "assistant_only_loss": True, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "learning_rate": 5e-05, "num_train_epochs": 2, "max_steps": -1, "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.1,
    "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "bf16": True,
    "fp16": False, "tf32": None, "torch_compile": False, "torch_compile_backend": None, "torch_empty_cache_steps": None,
    "gradient_checkpointing": True, "dataloader_num_workers": 0, "dataloader_pin_memory": True, "save_strategy": "steps", "save_steps": 100,
    "logging_steps": 10, "report_to": ["tensorboard"], "run_name": "x", "push_to_hub": False, "hub_token": None, "use_liger_kernel": True,
    "loss_type": None, "deepspeed": None, "fsdp": [], "seed": 42})

DEEPSPEED = json.dumps({
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": 0.5,
    "bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9,
                          "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": "auto"}},
    "steps_per_print": 2000, "wall_clock_breakdown": False})

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: false
"""

FILES = {"axolotl.yml": AXOLOTL, "factory.yaml": FACTORY, "tune.yaml": TORCHTUNE, "sft.json": SFT, "ds.json": DEEPSPEED, "acc.yaml": ACCELERATE}
NEEDS_MODEL = {"ds.json", "acc.yaml"}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def translated(folder, name, *more):
    words = ["HuggingFaceTB/SmolLM2-135M", "a.jsonl"] if name in NEEDS_MODEL else []
    done = lmlaunch("init", "--from", name, *more, *words, "-o", "out.toml", cwd=folder)
    assert done.stdout == "out.toml\n"
    text = (folder / "out.toml").read_text()
    return tomllib.loads(text), text, done.stderr


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_named_and_the_result_plans(folder, name):
    _, text, told = translated(folder, name)
    content = json.loads(FILES[name]) if name.endswith(".json") else __import__("yaml").safe_load(FILES[name])
    assert "Unknown, left out" not in text and "unknown, left out" not in told
    named = {word.split(".")[0] for word in text.replace(",", " ").replace(":", " ").replace("#", " ").split()}
    assert set(content) - named == set()
    planned = lmlaunch("plan", "out.toml", "--gpus", "1", "--gpu-memory", "24GiB", "--json", cwd=folder)
    assert json.loads(planned.stdout)["fits"] is True


def test_axolotl_is_carried_over(folder):
    keys, text, told = translated(folder, "axolotl.yml")
    assert keys["model"] == {"path": "HuggingFaceTB/SmolLM2-135M", "dtype": "bf16", "quantize": "nf4"}
    assert keys["data"] == {"train": ["my-org/my-chats", "more.jsonl"], "format": "chat", "eval_fraction": 0.05, "max_length": 1024,
                            "packing": True}
    assert keys["train"] == {"method": "qlora", "epochs": 3, "global_batch": 8, "micro_batch": 2, "recompute": "block"}
    assert keys["optimizer"] == {"name": "paged_adamw_8bit", "lr": 2e-4, "weight_decay": 0, "schedule": "cosine", "warmup": 10}
    assert keys["lora"] == {"r": 32, "alpha": 16, "dropout": 0.05, "targets": ["all-linear"]}
    assert "lr = 2e-04" in text and "# learning_rate" in text  # where each comes from
    assert "  differs: saves_per_epoch: checkpoint.every counts" in told
    assert "computed for one device" in text


def test_what_lmlaunch_does_not_have_is_said(folder):
    keys, text, told = translated(folder, "factory.yaml")
    assert "  differs: use_galore: " in told and "use_galore: " in text
    assert keys["lora"]["dora"] is True
    assert keys["data"]["train"] == ["data/identity.json", "data/my_demo.json"] and keys["train"]["eval_every"] == 500
    assert keys["lora"]["alpha"] == 32 and keys["checkpoint"]["every"] == 500


def test_torchtune_is_carried_over(folder):
    keys, text, _ = translated(folder, "tune.yaml")
    assert keys["train"]["method"] == "lora" and keys["train"]["steps"] == 200 and keys["optimizer"]["clip"] == "none"
    assert keys["lora"]["targets"] == ["gate_proj", "up_proj", "down_proj", "q_proj", "v_proj", "o_proj"]
    assert keys["data"]["train"] == ["yahma/alpaca-cleaned"] and "profiler.enabled" in text


def test_a_recipe_with_its_deepspeed_and_accelerate_files(folder):
    keys, text, _ = translated(folder, "sft.json", "--from", "ds.json", "--from", "acc.yaml")
    assert keys["zero"]["stage"] == 3 and keys["offload"]["optimizer"] == "host" and keys["train"]["max_grad_norm"] == 0.5
    assert keys["train"]["global_batch"] == 16 and "for one device" not in text
    assert keys["log"]["to"] == ["tensorboard"] and keys["optimizer"]["lr"] == 1e-5


@pytest.mark.parametrize("text,code,what", [
    ("base_model: m\nrl: dpo\n", 10, "does not support: rl: preference tuning"),
    ("stage: ppo\nmodel_name_or_path: m\n", 10, 'stage "ppo"'),
    ("learning_rate: 1\n", 2, "nothing names model.path"),
    ("- 1\n- 2\n", 11, "no keys at its top level"),
    ("a: [1\nb: 2\n", 11, "this is not YAML"),
    ("a: !!python/object/apply:os.system ['touch ran']\n", 11, "this is not YAML"),
    ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(f"{n}: &{n} [{', '.join([f'*{p}'] * 10)}]\n" for p, n in zip("abcde", "bcdef")),
     11, "aliases counted"),
    ("a: &a [*a]\n", 11, "nested too deep, or holds itself"),
    ("{\"base_model\": \"m\", \"base_model\": \"n\"}", 11, ""),
])
def test_a_file_that_cannot_be_translated_is_refused(folder, text, code, what):
    (folder / "bad.yml").write_text(text)
    done = lmlaunch("init", "--from", "bad.yml", cwd=folder, check=False)
    assert done.returncode == code and what in done.stderr, done.stderr
    assert not (folder / "bad.toml").exists() and not (folder / "ran").exists()


def test_nothing_is_written_over(folder):
    (folder / "axolotl.toml").write_text("mine")
    done = lmlaunch("init", "--from", "axolotl.yml", cwd=folder, check=False)
    assert done.returncode == 14 and (folder / "axolotl.toml").read_text() == "mine"
    assert lmlaunch("init", "--from", "no.yml", cwd=folder, check=False).returncode == 11
    assert lmlaunch("init", cwd=folder, check=False).returncode == 2


def test_without_pyyaml_json_is_read_and_yaml_says_what_to_do(folder):
    program = ROOT / "src" / "data" / "foreign" / "yaml_json.py"
    hidden = "import sys; sys.modules['yaml'] = None; sys.path.insert(0, sys.argv[1]); import yaml_json; yaml_json.main()"
    done = subprocess.run([sys.executable, "-c", hidden, program.parent], input="a: 1", capture_output=True, text=True, check=True)
    assert "pip install pyyaml" in json.loads(done.stdout)["error"]["next"]
    lmlaunch("init", "--from", "sft.json", cwd=folder, env={**os.environ, "LMLAUNCH_PYTHON": "/no/such/python"})
    done = lmlaunch("init", "--from", "acc.yaml", "m", "d.jsonl", cwd=folder, check=False, env={**os.environ, "LMLAUNCH_PYTHON": "/no/such/python"})
    assert done.returncode == 10 and "LMLAUNCH_PYTHON" in done.stderr, done.stderr


def test_the_page_says_what_the_table_says():
    """Written by: lmlaunch init --words > docs/coming-from.md"""
    said = lmlaunch("init", "--words", cwd=ROOT).stdout
    assert said == (ROOT / "docs" / "coming-from.md").read_text()
