// Words people bring along: keys of common training scripts and what they are called here, and tables of
// later versions. Pure tables.
#pragma once

#include <string>
#include <string_view>

namespace lm {

struct OtherName {
  std::string_view theirs, ours;
};

inline constexpr OtherName kOtherNames[] = {
    {"learning_rate", "optimizer.lr"},
    {"lr_scheduler_type", "optimizer.schedule"},
    {"lr_scheduler", "optimizer.schedule"},
    {"scheduler", "optimizer.schedule"},
    {"warmup_steps", "optimizer.warmup"},
    {"warmup_ratio", "optimizer.warmup"},
    {"adam_epsilon", "optimizer.eps"},
    {"beta1", "optimizer.betas"},
    {"beta2", "optimizer.betas"},
    {"wd", "optimizer.weight_decay"},
    {"optim", "optimizer.name"},
    {"batch_size", "train.global_batch"},
    {"micro_batch_size", "train.micro_batch"},
    {"per_device_train_batch_size", "train.micro_batch"},
    {"gradient_accumulation_steps", "train.global_batch"},
    {"grad_accum", "train.global_batch"},
    {"num_train_epochs", "train.epochs"},
    {"num_epochs", "train.epochs"},
    {"max_steps", "train.steps"},
    {"gradient_checkpointing", "train.recompute"},
    {"gradient_clipping", "train.max_grad_norm"},
    {"clip_grad", "train.max_grad_norm"},
    {"eval_steps", "train.eval_every"},
    {"max_seq_length", "data.max_length"},
    {"max_seq_len", "data.max_length"},
    {"seq_len", "data.max_length"},
    {"sequence_len", "data.max_length"},
    {"sequence_length", "data.max_length"},
    {"truncation", "data.too_long"},
    {"sample_packing", "data.packing"},
    {"dataset", "data.train"},
    {"datasets", "data.train"},
    {"train_file", "data.train"},
    {"val_file", "data.eval"},
    {"val_set_size", "data.eval_fraction"},
    {"base_model", "model.path"},
    {"model_name_or_path", "model.path"},
    {"torch_dtype", "model.dtype"},
    {"precision", "model.dtype"},
    {"output_dir", "run.dir"},
    {"random_seed", "run.seed"},
    {"num_threads", "run.threads"},
    {"rank", "lora.r"},
    {"lora_r", "lora.r"},
    {"lora_alpha", "lora.alpha"},
    {"lora_dropout", "lora.dropout"},
    {"target_modules", "lora.targets"},
    {"use_rslora", "lora.rslora"},
    {"logging_steps", "log.every"},
    {"save_steps", "checkpoint.every"},
    {"save_every", "checkpoint.every"},
    {"save_total_limit", "checkpoint.keep"},
    {"load_best_model_at_end", "checkpoint.keep_best"},
    {"resume_from_checkpoint", "checkpoint.resume"},
    {"offload_optimizer", "offload.optimizer"},
    {"optimizer_offload", "offload.optimizer"},
    {"offload_param", "offload.weights"},
    {"offload_params", "offload.weights"},
    {"offload_gradients", "offload.gradients"},
    {"activation_offload", "offload.activations"},
    {"activation_offloading", "offload.activations"},
    {"nvme_path", "offload.paths"},
    {"swap_dir", "offload.paths"},
    {"cpu_memory", "offload.host_memory"},
    {"gpu_memory", "offload.device_memory"},
    {"block_size", "io.block"},
    {"queue_depth", "io.depth"},
    {"sub_group_size", "io.tile"},
};

// Tables that are described, and not there yet; refused by name.
struct LaterTable {
  std::string_view name, sentence;
};
inline constexpr LaterTable kLaterTables[] = {
    {"zero", "sharding over ranks is not supported yet: one rank trains"},
};

// Values that are described, and not there yet.
struct LaterValue {
  std::string_view key, value, sentence;
};
inline constexpr LaterValue kLaterValues[] = {
    {"train.method", "qlora", "qlora is not supported yet: full and lora are"},
};

}  // namespace lm
