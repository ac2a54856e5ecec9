"""How soon does the CLI process answer?

`lmlaunch` without LibTorch: help, a mistake in a configuration, very many of them, a plan for this machine, a plan of 8 billion
parameters for an imagined GPU beside the start alone, a page of a run's 10,000 steps, and `doctor`, which measures a disk. Each is
the quickest of some starts: other work of the machine only makes them longer.

Usage: cli.py BIN_DIR [--smoke] [--impossible]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Figure, Figures, common_options

CONFIG = 'model.path = "{}"\ndata.train = ["t.jsonl"]\n'
ROW = {"loss": 2.5, "tokens": 4096, "target_tokens": 4096, "epoch": 0.5}
WAVES = ["grad_norm", "lr", "tokens_per_s", "sol_pct", "step_ms", "data_ms", "host_bytes", "device_bytes", "read_bytes", "written_bytes",
         "to_device_bytes", "from_device_bytes", "sent_bytes", "hidden_pct"]


def model(work, name, hidden, ffn, layers, heads, kv_heads, vocab, tied):
    (work / name).mkdir()
    (work / name / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": 8192, "hidden_act": "silu", "rms_norm_eps": 1e-5}))


def long_run(work):
    """A run of 10,000 steps and 200 evaluations: no two rows have equal values."""
    run = work / "long"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG.format("small"))
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 10001):
            wave = {key: (1 + (step * 104729 + 7919 * i) % 9973 / 9973) * (3e9 if key.endswith("_bytes") else 33)
                    for i, key in enumerate(WAVES)}
            file.write(json.dumps({**ROW, **wave, "step": step, "loss": 2 / step**0.3 + 0.001 * (step * 7919 % 101)}) + "\n")
            if step % 50 == 0:
                file.write(json.dumps({"step": step, "eval_loss": 2 / step**0.3, "target_tokens": 9}) + "\n")
    (run / "status.json").write_text(json.dumps({"state": "done", "step": 10000}))


def prepared(work):
    model(work, "small", 576, 1536, 30, 9, 3, 49152, True)
    model(work, "large", 4096, 14336, 32, 32, 8, 128256, False)
    (work / "small.toml").write_text(CONFIG.format("small"))
    (work / "large.toml").write_text(CONFIG.format("large") + f'train.global_batch = 16\noffload.paths = ["{work}"]\n')
    (work / "wrong.toml").write_text(CONFIG.format("small") + "train.stpes = 3\n")
    (work / "many.toml").write_text(CONFIG.format("small") + "[train]\n" + "".join(f"qzx{i} = 1\n" for i in range(70000)))
    long_run(work)


def main():
    options = common_options(__doc__).parse_args()
    figures = Figures(options, [Figure("help, version, presets: the slowest", "ms", "a start of the program", at_most=300),
                                Figure("a mistake in a configuration", "ms", "a start of the program", at_most=100),
                                Figure("70,000 mistakes in a configuration", "ms", "a start of the program", at_most=1000),
                                Figure("plan of SmolLM2-135M for this machine", "ms", "a start of the program", at_most=300),
                                Figure("plan of Llama-3.1-8B beside the start alone", "ms", "a start of the program", at_most=50),
                                Figure("page of 10,000 steps", "ms", "a start of the program", at_most=1000),
                                Figure("doctor, with a disk that is measured", "ms", "a second of measuring", at_most=10000)])
    with tempfile.TemporaryDirectory(prefix="lmlaunch-cli-", dir=Path.cwd()) as directory:
        work = Path(directory)
        prepared(work)
        environment = {**os.environ, "HOME": directory}

        def quickest(*arguments, code=0, tries=1 if options.smoke else 20):
            best = float("inf")
            for _ in range(tries):
                start = time.monotonic()
                done = subprocess.run([options.bin_dir.resolve() / "lmlaunch", *arguments], cwd=work, env=environment, capture_output=True,
                                      text=True)
                best = min(best, 1e3 * (time.monotonic() - start))
                if done.returncode != code:
                    sys.exit(f"lmlaunch {' '.join(arguments)}: exit {done.returncode}\n{done.stderr}")
            return best

        figures.set("help, version, presets: the slowest", max(quickest(word) for word in ("--help", "--version", "presets", "help")))
        figures.set("a mistake in a configuration", quickest("--gpus", "0", "wrong.toml", code=10))
        figures.set("70,000 mistakes in a configuration", quickest("--gpus", "0", "many.toml", code=10))
        figures.set("plan of SmolLM2-135M for this machine", quickest("plan", "small.toml", "--gpus", "0", "--host-memory", "64GiB"))
        # State in host memory alone: with less, the plan asks for 56 GiB of the disk, which not every machine has free.
        plan = quickest("plan", "large.toml", "--gpu-memory", "24GiB", "--host-memory", "256GiB")
        figures.set("plan of Llama-3.1-8B beside the start alone", plan - quickest("--version"))
        figures.set("page of 10,000 steps", quickest("report", "long"))
        figures.set("doctor, with a disk that is measured", quickest("doctor", tries=1 if options.smoke else 3))
    figures.finish()


if __name__ == "__main__":
    main()
