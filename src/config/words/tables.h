// The tables of the projects, and the reasons that several of them share.
#pragma once

#include <span>

#include "config/words/word.h"

namespace lm {

std::span<const Word> slips();
std::span<const Word> trainer_words();
std::span<const Word> task_words();
std::span<const Word> peft_words();
std::span<const Word> axolotl_words();
std::span<const Word> axolotl_task_words();
std::span<const Word> llama_factory_words();
std::span<const Word> torchtune_words();
std::span<const Word> unsloth_words();
std::span<const Word> deepspeed_words();
std::span<const Word> accelerate_words();

namespace why {

inline constexpr std::string_view
    kTrackers =
        "curves are in the run's metrics.jsonl and report.html; log.to sends "
        "them to tensorboard, wandb, mlflow or trackio",
    kTrackerNames =
        "log.to names the tracker; project and server are set by its own "
        "variables, such as WANDB_PROJECT",
    kHub = "nothing is uploaded: `lmlaunch export` makes a directory for that",
    kAttention = "attention that stores no score matrix is always used",
    kFused = "kernels are fused, and the logits never exist in full, always",
    kCompile = "nothing is compiled at run time: the kernels are ours",
    kLoader = "tokens are read from a memory-mapped file; no loader processes",
    kTokenizer = "the tokenizer.json of model.path is used as it is",
    kNoCode = "no code of a model's repository is ever executed",
    kPreference = "preference tuning and reinforcement learning are not done",
    kReward = "see train.objective; keys of these tasks are not translated",
    kVision = "images and audio are not read",
    kQuantized = "model.quantize has nf4, fp4 and int8, made from the original",
    kFp8 = "training is in bf16 or fp32",
    kParallel = "ranks share data and state (zero.stage), not a layer's products",
    kExperts = "experts are not trained in parallel parts",
    kFsdpDetail = "blocks are the sharding units; their transfers are planned",
    kLaunch = "set on the command line: --gpus N, mpirun or srun",
    kCloud = "the cluster's scheduler decides where a run starts",
    kLora = "adapters are LoRA, DoRA, IA3, LN tuning, prefixes and prompts; no other kind",
    kOptimizer = "optimizer.name lists the supported optimizers",
    kLoss = "the loss is cross-entropy over the target tokens",
    kOnly = "set train.only instead: it names the tensors that are trained",
    kUnfrozen = "all weights are trained, or adapters: no choice of tensors";

}  // namespace why
}  // namespace lm
