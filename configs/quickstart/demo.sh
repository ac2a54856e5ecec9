#!/usr/bin/env bash
# The quickstart, step by step: ./dev demo calls it as demo.sh LMLAUNCH, with LMLAUNCH_PYTHON set, from the repository's
# root. Makes the model and the text (once), asks a question, trains, asks again.
set -euo pipefail
lmlaunch=$1
model=${XDG_CACHE_HOME:-$HOME/.cache}/lmlaunch/models/smollm2-135m-instruct
work=build/quickstart
run=runs/quickstart
question='What does `str.isupper()` do in Python?' # held out: its answer is in eval.jsonl

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
ask() { "$lmlaunch" generate "$1" --prompt "$question" --max-tokens 60; }

say "1. The model and the text"
mkdir -p "$work"
"$LMLAUNCH_PYTHON" configs/quickstart/make_model.py "$model"
ln -sfn "$model" "$work/model"
"$LMLAUNCH_PYTHON" configs/quickstart/make_data.py "$work/model" "$work"

say "2. Its answer before training: $question"
before=$(ask "$work/model")
echo "$before"

say "3. Training: $lmlaunch configs/quickstart.toml"
rm -rf "$run" # the demo starts afresh each time
started=$SECONDS
"$lmlaunch" configs/quickstart.toml
trained=$((SECONDS - started))

say "4. Its answer after training"
after=$(ask "$run")
echo "$after"

say "What changed ($trained s of training)"
"$LMLAUNCH_PYTHON" - "$run/metrics.jsonl" <<'PYTHON'
import json, math, sys
losses = [row["eval_loss"] for row in map(json.loads, open(sys.argv[1])) if "eval_loss" in row]
print(f"eval loss {losses[0]:.4f} -> {losses[-1]:.4f}, perplexity {math.exp(losses[0]):.2f} -> {math.exp(losses[-1]):.2f}")
sys.exit(losses[-1] >= losses[0])
PYTHON
printf 'question: %s\nbefore:   %s\nafter:    %s\n' "$question" "${before//$'\n'/ }" "${after//$'\n'/ }"
echo "the fine-tuned model is in $run/model, every step in $run/metrics.jsonl"
