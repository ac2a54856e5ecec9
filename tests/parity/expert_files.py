"""The tensors of a mixture of experts by the names of its files: transformers 5 holds those of all experts as one, and writes each
expert's by itself; Granite's, gpt-oss's and Gemma's files have them together, too."""

import re

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
GRANITE = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}


def of_granite(name, tensor, together):
    path, last = name.rsplit(".", 1)
    if not path.endswith(".block_sparse_moe.experts"):
        return [(re.sub(r"(?<=\.block_sparse_moe\.router\.)(?!layer\.)", "layer.", name), tensor)]  # or a file's name already
    path = path.replace(".experts", f".{GRANITE[last]}")
    return [(f"{path}.weight", tensor)] if together else [(f"{path}.{e}.weight", one) for e, one in enumerate(tensor)]


def of_gpt_oss(name, tensor, together):
    path, last = name.rsplit(".", 1)
    if not path.endswith(".mlp.experts") or together:
        return [(name, tensor)]
    kind = "bias" if last.endswith("_bias") else "weight"
    return [(f"{path}.{last.removesuffix('_bias')}.{e}.{kind}", one) for e, one in enumerate(tensor)]


def of_gemma4(name, tensor, together):
    path, last = name.rsplit(".", 1)
    if not path.endswith(".experts") or together:
        return [(name, tensor)]
    return [(f"{path}.{last}.{e}.weight", one) for e, one in enumerate(tensor)]


def in_files(model_type, name, tensor, together=True):
    """(name, tensor) of each tensor of the files that this parameter holds. `together`: of all experts where the files have them so, else
    of each."""
    if model_type == "granitemoe":
        return of_granite(name, tensor, together)
    if model_type.startswith("gemma4"):
        return of_gemma4(name, tensor, together)
    if model_type in ("gpt_oss", "gptoss"):
        return of_gpt_oss(name, tensor, together)
    mixtral = model_type in ("mixtral", "minimax_m2", "minimaxm2")  # the last: its class's name
    path, last = name.rsplit(".", 1)
    if not path.endswith(".mlp.experts"):
        return [(name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name, tensor)]
    path = path.replace(".mlp.", ".block_sparse_moe.") if mixtral else path
    rows = tensor.shape[1] // 2
    parts = {"gate_proj": tensor[:, :rows], "up_proj": tensor[:, rows:]} if last == "gate_up_proj" else {last: tensor}
    return [(f"{path}.{e}.{MIXTRAL[part] if mixtral else part}.weight", value[e]) for part, value in parts.items() for e in range(len(value))]


def all_in_files(model_type, tensors, together=True):
    return dict(pair for name, tensor in tensors.items() for pair in in_files(model_type, name, tensor, together))
