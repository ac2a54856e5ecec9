"""parity_tool_gpu against transformers: logits, loss, gradients, five AdamW steps, within the bounds of tests/parity/bounds.py.
Where this Python has transformers, the models of tests/parity/tiny_models.py, and of the other families one for each kernel; elsewhere
the models, inputs and results in fixtures/, which `--make` wrote where it has.

  python parity.py [--fixtures DIRECTORY] BIN [MODEL...]     BIN/parity_tool_gpu (on the emulator: emulator_parity_tool_gpu);
                                                             with --fixtures: against these, whatever is installed
  python parity.py --make DIRECTORY
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' progress bars
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(directory) for directory in (HERE, HERE.parent / "parity") if (directory / "reference.py").exists()]
import bounds  # noqa: E402
import reference  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Grouped and odd heads, tied and untied heads, biases, q/k norms, a window.
CARRIED = [(name, dtype) for name in ("llama_three_heads_per_key_tied_with_pad_token", "qwen3_tied_biases") for dtype in DTYPES]
CARRIED.append(("mistral_window_shorter_than_documents", "bf16"))
CODES = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32}


def read_tensors(path):
    """A safetensors file; this machine may lack the library."""
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header, base = json.loads(data[8:8 + length]), 8 + length
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(bytearray(data[base + t["data_offsets"][0]:base + t["data_offsets"][1]]),
                                   dtype=CODES[t["dtype"]]).reshape(t["shape"]) for name, t in header.items()}


def write_tensors(tensors, path):
    header, parts, at = {}, [], 0
    for name, tensor in tensors.items():
        code = next(code for code, dtype in CODES.items() if dtype == tensor.dtype)
        part = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, at + len(part)]}
        parts.append(part)
        at += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def flat(result):
    """{"logits": ..., "grad.NAME": ..., "weight.NAME": ...} as parity_tool writes it."""
    return {"logits": result["logits"], "loss": result["loss"].reshape(1), "losses": result["losses"],
            **{"grad." + n: t for n, t in result["gradients"].items()}, **{"weight." + n: t for n, t in result["weights"].items()}}


def prefixed(tensors, prefix):
    return {name[len(prefix):]: tensor.float() for name, tensor in tensors.items() if name.startswith(prefix)}


def make_case(name, dtype, directory):
    """A model, an input and what transformers makes of both, in files."""
    import tiny_models
    import tool

    model = tiny_models.make(name, directory / "model", DTYPES[dtype])
    documents = tiny_models.documents(name, model)
    theirs = reference.train(model, documents, bounds.STEPS, bounds.LR, bounds.WEIGHT_DECAY)
    (directory / "case.json").write_text(json.dumps({"idle": tiny_models.idle(name), "tool": tiny_models.options(name)}))
    write_tensors(tool.batch_tensors(documents), directory / "input.safetensors")
    # Results of bf16 are compared by their direction: 8 bits will do.
    theirs = {tiny_models.canonical(name): tensor.to(DTYPES[dtype]) if "." in name else tensor for name, tensor in flat(theirs).items()}
    write_tensors(theirs, directory / "theirs.safetensors")


def run_tool(program, case, dtype, work):
    output = work / "ours.safetensors"
    options = {"dtype": dtype, "threads": 1, "steps": bounds.STEPS, "lr": bounds.LR, "weight-decay": bounds.WEIGHT_DECAY,
               **read_case(case)["tool"]}
    done = subprocess.run([program, case / "model", case / "input.safetensors", output,
                           *(str(word) for name, value in options.items() for word in ("--" + name.replace("_", "-"), value))],
                          capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise AssertionError(f"parity_tool: exit status {done.returncode}: {done.stderr.strip()}")
    return read_tensors(output)


def read_case(case):
    return json.loads((case / "case.json").read_text())


def compare(dtype, ours, theirs, idle=()):
    bounds.check(dtype, ours["logits"].float(), theirs["logits"])
    for prefix in ("grad.", "weight."):
        bounds.check_all(dtype, *(bounds.determined(prefixed(tensors, prefix), idle) for tensors in (ours, theirs)))
    for name, allowed in (("loss", bounds.LOSS[dtype]), ("losses", bounds.LOSSES[dtype])):
        error = ((ours[name] - theirs[name]).abs() / theirs[name].abs()).max().item()
        assert error <= allowed, f"{name}: relative error {error:.2g}, allowed {allowed:.2g}"


def usable_transformers():
    """"" if tiny_models can make its models here, else why not."""
    try:
        import safetensors.torch  # noqa: F401
        import transformers
    except ImportError as missing:
        return f"no {missing.name} here"
    version = transformers.__version__
    return "" if int(version.split(".")[0]) >= 5 else f"transformers {version} is older than 5"


def pairs(names=()):
    """(name, dtype) of each model of `names` in both types; without them of Llama's relatives, and the other families' kernels in one type
    by turns; mixtures of experts in fp32."""
    import tiny_models
    others = [] if names else [(name, list(DTYPES)[i % 2]) for i, name in enumerate(tiny_models.KERNELS)]
    others += [] if names else [(name, "fp32") for name in tiny_models.ROUTED]
    return [(name, dtype) for name in names or tiny_models.MODELS for dtype in DTYPES] + others


def cases(names, fixtures, work):
    """(name, dtype, directory) of each. `fixtures`: the directory to take, or None to make them if that can be done here."""
    obstacle = usable_transformers() if fixtures is None else "not asked for transformers"
    print(f"parity: {obstacle}: against fixtures" if obstacle else "parity: against this machine's transformers")
    if obstacle:
        for directory in sorted((fixtures or HERE / "fixtures").glob("*-*")):
            name, dtype = directory.name.rsplit("-", 1)
            if not names or name in names:
                yield name, dtype, directory
        return
    for name, dtype in pairs(names):
        directory = work / f"{name}-{dtype}"
        directory.mkdir()
        make_case(name, dtype, directory)
        yield name, dtype, directory


def problem(program, case, dtype):
    """"" if they agree."""
    with tempfile.TemporaryDirectory() as work:
        try:
            compare(dtype, run_tool(program, case, dtype, Path(work)), read_tensors(case / "theirs.safetensors"), read_case(case)["idle"])
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return str(error)
    return ""


def run(bin_directory, names, fixtures):
    program = next((p for p in (bin_directory / "parity_tool_gpu", bin_directory / "emulator_parity_tool_gpu") if p.exists()), None)
    if program is None:
        print(f"parity: no parity_tool_gpu in {bin_directory}")
        return 2
    # The tool's start takes longer than its work: some at once.
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(min(4, os.cpu_count())) as pool:
        running = [(name, dtype, pool.submit(problem, program, case, dtype)) for name, dtype, case in cases(names, fixtures, Path(work))]
        failed = 0
        for name, dtype, result in running:
            failed += bool(result.result())
            print(f"parity: {name} {dtype}: {'FAILED: ' + result.result() if result.result() else 'agrees'}", flush=True)
    print(f"figure: {len(running) - failed} of {len(running)} agree with transformers")
    return 1 if failed or not running else 0


def make(directory):
    shutil.rmtree(directory, ignore_errors=True)
    for name, dtype in CARRIED:
        case = directory / f"{name}-{dtype}"
        case.mkdir(parents=True)
        make_case(name, dtype, case)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--make":
        sys.exit(make(Path(sys.argv[2])))
    given = sys.argv[1] == "--fixtures"
    words = sys.argv[3 if given else 1:]
    sys.exit(run(Path(words[0]).resolve(), words[1:], Path(sys.argv[2]).resolve() if given else None))
