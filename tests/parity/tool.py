"""Runs build/bin/parity_tool: one batch through lmlaunch's own model, gradients and optimizer.

  parity_tool MODEL_DIR INPUT.safetensors OUTPUT.safetensors [--dtype fp32|bf16|fp16] [--steps N] [--lr X] [--weight-decay X]
              [--recompute none|attention|block|N] [--micro-batches M] [--adapter PEFT_DIR] [--threads N] [--gradients fp32|bf16]
              [--max-grad-norm X] [--eps X] [--off-device none|disk|host] [--optimizer adamw|sgd] [--momentum X]
              [--quantize none|nf4|fp4|int8] [--double-quantize yes|no] [--adapter-dtype auto|fp32] [--generate N] [--max-length N]
              [--groups TOML of optimizer.groups] [--only TOML of train.only] [--encoder N]

It trains at a constant learning rate, betas 0.9 and 0.999, unless told otherwise without clipping and with eps 1e-8.
"""

import functools
import itertools
import os
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TOOL = Path(os.environ.get("LM_BIN", Path(__file__).resolve().parents[2] / "build" / "bin")) / "parity_tool"


def batch_tensors(documents):
    lengths = [len(d.token) for d in documents]
    starts = [0, *itertools.accumulate(lengths)]
    return {
        "token": torch.cat([d.token for d in documents]).int(),
        "position": torch.cat([torch.arange(n) for n in lengths]).int(),
        "target": torch.cat([d.target for d in documents]).int(),
        "document_start": torch.tensor(starts, dtype=torch.int32),
    }


@functools.cache
def server():
    """Started once for all runs; it ends with its input, when this process ends."""
    return subprocess.Popen([TOOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(model_dir, documents, work, **options):
    """The tool's output: logits, loss, losses, norms, and the dictionaries gradients, weights and masters by the names
    that transformers and peft give them in their files."""
    work.mkdir(parents=True, exist_ok=True)
    save_file(batch_tensors(documents), work / "input.safetensors")
    options = {"dtype": "fp32", "threads": 1, **options}
    arguments = [str(v) for k, value in options.items() for v in ("--" + k.replace("_", "-"), value)]
    print(work / "error", model_dir, work / "input.safetensors", work / "output.safetensors", *arguments, sep="\t", file=server().stdin, flush=True)
    status = server().stdout.readline().strip()
    assert status == "0", f"parity_tool {' '.join(arguments)}: status {status}\n{(work / 'error').read_text()}"
    tensors = load_file(work / "output.safetensors")
    if "generated" in tensors:
        return tensors["generated"].long()
    of = lambda prefix: {k[len(prefix):]: v.float() for k, v in tensors.items() if k.startswith(prefix)}
    return {"logits": tensors["logits"], "loss": tensors["loss"][0], "token_accuracy": tensors.get("token_accuracy"), "losses": tensors.get("losses"), "norms": tensors.get("norms"),
            "gradients": of("grad."), "weights": of("weight."), "masters": of("master."), "bytes": (work / "output.safetensors").read_bytes()}
