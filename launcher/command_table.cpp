#include "launcher/command_table.h"

namespace lm {
namespace {

const FlagRow kJson{"--json", Takes::kNothing, "", "one JSON object on stdout"};
const FlagRow kGpus{"--gpus", Takes::kCount, "N",
                    "0: the CPU; default: 1 if a GPU is visible, else the CPU with a note"};

// For commands that compute nothing: a script may pass --gpus 0 to all commands.
const FlagRow kNoGpus{"--gpus", Takes::kCount, "0",
                      "0 alone: files are read and written tensor by tensor, which a GPU would not speed up"};

// Sampling options of generate and chat.
const FlagRow kTemperature{"--temperature", Takes::kNumber, "T", "sampling temperature; default: 0, greedy"};
const FlagRow kTopP{"--top-p", Takes::kNumber, "P",
                    "nucleus sampling: the likeliest tokens of this total probability; default: 1, all"};
const FlagRow kTopK{"--top-k", Takes::kCount, "K", "sample from the K likeliest tokens; default: 0, all"};
const FlagRow kSeed{"--seed", Takes::kCount, "S", "random seed of sampling; default: 0"};

const FlagRow kSystem{"--system", Takes::kText, "TEXT",
                      "a system message before the conversation; default: none"};

const FlagRow kAdapter{"--adapter", Takes::kTexts, "DIR[@WEIGHT]",
                       "an adapter of the model, a directory or a run, with its weight; may be repeated: "
                       "the model has their sum"};

// A repeated argument has no upper limit.
constexpr size_t kMany = 1000000;

CommandRow training() {
  return {
      "train",
      "CONFIG.toml [table.key=value ...]",
      "fine-tune; `train` itself may be left out",
      1,
      1,
      true,
      {{"--gpus", Takes::kCount, "N",
        "GPUs of this machine that share the run, a process each; 0: the CPU; default: 1 if one is visible"},
       {"--ranks", Takes::kCount, "N",
        "CPU processes on this machine that share the run; on several machines: mpirun -n N lmlaunch ..."},
       {"--restarts", Takes::kCount, "N",
        "start again from the newest checkpoint, at most N times, if a rank is lost or hangs; default: 0"},
       {"--elastic", Takes::kNothing, "",
        "with --restarts: start again with fewer ranks if a GPU is gone, or if a rank is killed before its "
        "first "
        "step twice in a row"},
       {"--dry-run", Takes::kNothing, "", "print the plan and stop"},
       {"--override", Takes::kTexts, "KEY",
        "resume from a checkpoint although this key's value has changed; may be repeated"},
       {"--trace", Takes::kText, "FILE", "write steps 2 to 4 as a timeline for Perfetto"},
       {"--run-dir", Takes::kText, "DIR", "", true},
       {"--control-fd", Takes::kCount, "FD", "", true},
       {"--lock-fd", Takes::kCount, "FD", "", true},
       {"--rank", Takes::kCount, "R", "", true},
       {"--ranks-fd", Takes::kCount, "FD", "", true},
       {"--mpi", Takes::kText, "PLUGIN", "", true},
       {"--refused", Takes::kText, "JSON", "", true}}};
}

CommandRow reporting() {
  return {"report",
          "RUN [RUN ...]",
          "write a run, or several, as one HTML page",
          1,
          kMany,
          false,
          {{"-o", Takes::kText, "FILE",
            "output file; default: RUN/report.html, of several runs report.html here"},
           kJson}};
}

CommandRow completing() {
  return {"completions", "", "a script for bash and zsh: eval \"$(lmlaunch completions)\"", 0, 0, false, {}};
}

CommandRow fetching() {
  return {"fetch",
          "ORG/NAME[@REVISION]",
          "download a model, an adapter or a data set from the Hugging Face hub into its local cache",
          1,
          1,
          false,
          {{"--data", Takes::kNothing, "", "a data set; default: a model or an adapter"}, kJson}};
}

CommandRow beginning() {
  return {
      "init",
      "MODEL DATA [DATA ...]",
      "write a commented configuration that fits this machine, or one --from another trainer's",
      0,
      kMany,
      false,
      {{"-o", Takes::kText, "FILE", "output file; default: MODEL's name with .toml"},
       {"--method", Takes::kText, "METHOD", "full, lora or qlora; default: the fastest that fits"},
       {"--disk", Takes::kTexts, "DIR", "a directory on a fast disk for offloaded state; may be repeated"},
       {"--from", Takes::kTexts, "FILE",
        "translate a file of Axolotl, LLaMA-Factory, torchtune, TRL, DeepSpeed or accelerate (YAML or "
        "JSON); may be repeated; MODEL and DATA only where it names none"},
       {"--words", Takes::kNothing, "", "print what the keys of other trainers are called here, as Markdown"},
       kGpus}};
}

CommandRow planning() {
  return {"plan",
          "CONFIG.toml [table.key=value ...]",
          "memory and time, for this machine or an imagined one; CONFIG.toml may be a preset's name",
          1,
          1,
          true,
          {kJson,
           {"--machine", Takes::kText, "FILE",
            "plan for a machine that `lmlaunch doctor --json` has described, idle, not for this one"},
           {"--gpu", Takes::kText, "NAME", "plan for a card of this name, e.g. RTX-4090, T4 or H100"},
           {"--gpu-memory", Takes::kBytes, "SIZE", "plan for a GPU of this memory, e.g. 24GiB"},
           {"--gpu-flops", Takes::kNumber, "N", "of that GPU: TFLOP/s of dense bf16 products"},
           {"--gpu-bandwidth", Takes::kBytes, "SIZE", "of that GPU: memory read per second, e.g. 1008GB"},
           {"--host-memory", Takes::kBytes, "SIZE", "plan for this much host memory (of each machine)"},
           {"--compare", Takes::kNothing, "",
            "a table of other ways to train it: methods, optimizers, master weights, with or without a disk; "
            "those that fit first, the fastest first"},
           {"--gpus", Takes::kCount, "N",
            "0: the CPU; 1: one GPU; more: plan for so many GPUs, which need not be here"},
           {"--ranks", Takes::kCount, "N", "plan for so many CPU processes that share the run"},
           {"--nodes", Takes::kCount, "M",
            "the GPUs or processes are on M machines like this one, equally many on each"},
           {"--gpu-link", Takes::kBytes, "SIZE",
            "per second from GPU to GPU of a machine; default: by the GPU's name, else 22GB"},
           {"--node-link", Takes::kBytes, "SIZE",
            "per second from machine to machine, all GPUs of one together; default: 45GB"}}};
}

CommandRow generating() {
  return {"generate",
          "RUN|CHECKPOINT|MODEL|ADAPTER --prompt TEXT [table.key=value ...]",
          "answer a prompt, or a file of prompts, with the model's chat template if it has one",
          1,
          1,
          true,
          {{"--prompt", Takes::kText, "TEXT", "what to answer or continue"},
           {"--prompts", Takes::kText, "FILE",
            "instead, every line of a file; of a .jsonl, objects with prompt or messages; prints a JSON line "
            "for each, in this order"},
           kAdapter,
           kSystem,
           {"--batch", Takes::kCount, "N", "rows of --prompts that are answered together; default: 8"},
           {"--max-tokens", Takes::kCount, "N", "maximum new tokens; default: 128"},
           kTemperature,
           kTopP,
           kTopK,
           kSeed,
           kGpus,
           kJson}};
}

CommandRow merging() {
  return {"merge",
          "ADAPTER[@WEIGHT] [ADAPTER[@WEIGHT] ...] -o DIR",
          "combine LoRA adapters of one base model into one, as peft's add_weighted_adapter does",
          1,
          kMany,
          false,
          {{"-o", Takes::kText, "DIR", "output directory"},
           {"--type", Takes::kText, "TYPE",
            "cat: exact, the ranks add up (default); svd: its best approximation of a rank; linear: adds the "
            "matrices A and B, of one rank, each with the root of its weight"},
           {"--rank", Takes::kCount, "N", "of svd; default: the largest rank of the adapters"},
           {"--base", Takes::kText, "DIR",
            "the base model of all of them, where they name it by different directories"},
           kNoGpus,
           kJson}};
}

CommandRow chatting() {
  return {"chat",
          "RUN|CHECKPOINT|MODEL|ADAPTER [table.key=value ...]",
          "chat with a model: a line of standard input is a turn",
          1,
          1,
          true,
          {kAdapter,
           kSystem,
           {"--max-tokens", Takes::kCount, "N", "maximum new tokens of an answer; default: 1024"},
           {"--context", Takes::kCount, "N",
            "maximum tokens of the conversation; default: 4096, or the model's context length if less"},
           kTemperature,
           kTopP,
           kTopK,
           kSeed,
           kGpus}};
}

CommandRow serving() {
  return {
      "serve",
      "RUN|CHECKPOINT|MODEL|ADAPTER [table.key=value ...]",
      "answer OpenAI's completions and chat completions over HTTP",
      1,
      1,
      true,
      {kAdapter,
       {"--port", Takes::kCount, "N", "default: 8000; 0: one that is free"},
       {"--host", Takes::kText, "ADDRESS",
        "address to listen on; default: 127.0.0.1; any but loopback needs --token-file"},
       {"--token-file", Takes::kText, "FILE",
        "a file whose line is the bearer token that requests must bring; default: none"},
       {"--context", Takes::kCount, "N",
        "maximum tokens of a prompt and its answer; default: 4096, or the model's context length if less"},
       {"--batch", Takes::kCount, "N", "answers that are computed together; default: 8"},
       kGpus}};
}

}  // namespace

const std::vector<CommandRow>& commands() {
  static const std::vector<CommandRow> rows = {
      training(),
      fetching(),
      beginning(),
      planning(),
      {"export",
       "RUN|CHECKPOINT|MODEL|ADAPTER -o DIR",
       "write a Hugging Face directory, a PEFT adapter, or a file for llama.cpp",
       1,
       1,
       false,
       {{"-o", Takes::kText, "DIR", "output directory; with --gguf, a file's name"},
        {"--gguf", Takes::kText, "TYPE",
         "a model as one file for llama.cpp, its matrices in f16, bf16 or q8_0 (8 bits)"},
        {"--adapter", Takes::kNothing, "", "a PEFT adapter: of a run that trains one the default"},
        {"--patterns", Takes::kNothing, "",
         "with lora.ranks or lora.alphas: keep them, as PEFT's rank_pattern and alpha_pattern; "
         "without it the adapter is written with one rank and alpha, since servers ignore the patterns"},
        {"--each-expert", Takes::kNothing, "",
         "with lora.experts: the pairs by each expert's number and matrices (experts.3.gate_proj), as vLLM "
         "names them"},
        {"--merge", Takes::kNothing, "",
         "merge the adapter into the weights that it was trained on; the result is read again and "
         "compared, unless --gguf"},
        {"--base", Takes::kText, "DIR",
         "with --merge: into this model's weights (of a quantized one, the original)"},
        kNoGpus,
        kJson}},
      merging(),
      generating(),
      chatting(),
      serving(),
      {"eval",
       "CONFIG|RUN|CHECKPOINT|MODEL|ADAPTER [table.key=value ...]",
       "loss and perplexity on the evaluation set, accuracy of choices; of a model: on "
       "data.eval=[\"FILE\"]",
       1,
       1,
       true,
       {kGpus,
        {"--scores", Takes::kText, "FILE", "write the log-likelihood of each ending of rows of choices"},
        kJson}},
      {"verify",
       "RUN|CHECKPOINT|MODEL|ADAPTER",
       "check every checksum, print one hash of the weights",
       1,
       1,
       false,
       {kNoGpus, kJson}},
      reporting(),
      {"diff",
       "RUN RUN",
       "the first step and the first tensor in which two runs differ, and the settings; exit code 1 if they "
       "do",
       2,
       2,
       false,
       {kNoGpus, kJson}},
      {"doctor",
       "",
       "check this machine: GPUs, disks, libraries, and how to fix what is missing",
       0,
       0,
       false,
       {{"--path", Takes::kTexts, "DIR", "also measure the disk of this directory; may be repeated"},
        kJson,
        {"--copies", Takes::kNothing, "", "", true}}},
      {"presets", "[NAME]", "list the presets, or print one as a commented TOML", 0, 1, false, {kJson}},
      {"help",
       "[COMMAND|TABLE|KEY]",
       "explain a command, or a table or key of the configuration",
       0,
       1,
       false,
       {{"--markdown", Takes::kNothing, "", "every key of the configuration as a page"}}},
      completing(),
  };
  return rows;
}

const CommandRow* find_command(const std::string& name) {
  for (const CommandRow& row : commands()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

}  // namespace lm
