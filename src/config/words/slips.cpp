#include "config/words/tables.h"

namespace lm {
namespace {

constexpr Word kWords[] = {
    to("lr_scheduler", "optimizer.schedule"),
    to("scheduler", "optimizer.schedule"),
    to("warmup_ratio", "optimizer.warmup"),
    to("beta1", "optimizer.betas"),
    to("beta2", "optimizer.betas"),
    to("wd", "optimizer.weight_decay"),
    to("optim", "optimizer.name"),
    to("batch_size", "train.global_batch"),
    to("micro_batch_size", "train.micro_batch"),
    to("grad_accum", "train.global_batch"),
    to("clip_grad", "train.max_grad_norm"),
    to("early_stopping", "train.early_stopping_patience"),
    to("patience", "train.early_stopping_patience"),
    to("max_seq_len", "data.max_length"),
    to("seq_len", "data.max_length"),
    to("sequence_length", "data.max_length"),
    to("truncation", "data.too_long"),
    to("dataset", "data.train"),
    to("datasets", "data.train"),
    to("max_train_samples", "data.max_rows"),
    to("train_file", "data.train"),
    to("val_file", "data.eval"),
    to("precision", "model.dtype"),
    to("random_seed", "run.seed"),
    to("num_threads", "run.threads"),
    to("rank", "lora.r"),
    to("lora_alpha", "lora.alpha"),
    to("lora_dropout", "lora.dropout"),
    to("target_modules", "lora.targets"),
    to("save_every", "checkpoint.every"),
    to("offload_optimizer", "offload.optimizer"),
    to("optimizer_offload", "offload.optimizer"),
    to("offload_param", "offload.weights"),
    to("offload_params", "offload.weights"),
    to("offload_gradients", "offload.gradients"),
    to("activation_offload", "offload.activations"),
    to("activation_offloading", "offload.activations"),
    to("nvme_path", "offload.paths"),
    to("swap_dir", "offload.paths"),
    to("cpu_memory", "offload.host_memory"),
    to("gpu_memory", "offload.device_memory"),
    to("block_size", "io.block"),
    to("queue_depth", "io.depth"),
    to("sub_group_size", "io.tile"),
    when_on("tensorboard", "log.to", R"(["tensorboard"])", "log.tensorboard of earlier versions"),
};

}  // namespace

std::span<const Word> slips() {
  return kWords;
}

}  // namespace lm
