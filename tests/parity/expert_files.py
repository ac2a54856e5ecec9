"""The tensors of a mixture of experts by the names of its files: transformers 5 holds those of all experts as one, and writes each
expert's by itself."""

MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def in_files(model_type, name, tensor):
    """(name, tensor) of each tensor of the files that this parameter holds."""
    mixtral = model_type == "mixtral"
    path, last = name.rsplit(".", 1)
    if not path.endswith(".mlp.experts"):
        return [(name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral else name, tensor)]
    path = path.replace(".mlp.", ".block_sparse_moe.") if mixtral else path
    rows = tensor.shape[1] // 2
    parts = {"gate_proj": tensor[:, :rows], "up_proj": tensor[:, rows:]} if last == "gate_up_proj" else {last: tensor}
    return [(f"{path}.{e}.{MIXTRAL[part] if mixtral else part}.weight", value[e]) for part, value in parts.items() for e in range(len(value))]


def all_in_files(model_type, tensors):
    return dict(pair for name, tensor in tensors.items() for pair in in_files(model_type, name, tensor))
