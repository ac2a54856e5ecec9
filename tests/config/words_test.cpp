#include "config/words/word.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "config/words/tables.h"
#include "config/words/translate.h"

namespace lm {
namespace {

using Json = nlohmann::json;

constexpr const char* kLeast = "[model]\npath = \"m\"\n[data]\ntrain = [\"t.jsonl\"]\n";

std::vector<Word> all_words() {
  std::vector<Word> out;
  for (const auto& table :
       {slips(), trainer_words(), task_words(), peft_words(), axolotl_words(), axolotl_task_words(),
        llama_factory_words(), torchtune_words(), unsloth_words(), deepspeed_words(), accelerate_words()})
    out.insert(out.end(), table.begin(), table.end());
  return out;
}

std::string report_of(const std::string& text) {
  try {
    parse_config(text, "c.toml");
  } catch (const Error& error) {
    return error.report();
  }
  return "";
}

Translated translated(const std::string& json, const std::string& model = "",
                      const std::vector<std::string>& data = {}) {
  return translate({{"f.json", Json::parse(json)}}, model, data);
}

// "key = value" of a setting; "" where it is not set.
std::string value_of(const Translated& done, const std::string& key) {
  for (const auto& setting : done.settings) {
    if (setting.key == key) return setting.value;
  }
  return "";
}

std::string why(const std::vector<Translated::Left>& all, const std::string& theirs) {
  for (const auto& left : all) {
    if (left.theirs == theirs) return left.why;
  }
  return "";
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "no <" << (part) << "> in\n" << (text)

TEST(Words, OursAreKeysAndEveryOtherHasAReason) {
  std::set<std::string> keys;
  for (const KeyText& key : list_keys(Config{})) keys.insert(key.table + "." + key.name);
  for (const Word& word : all_words()) {
    if (word.fate == Fate::kKey) {
      EXPECT_TRUE(keys.count(std::string(word.ours))) << word.theirs << " -> " << word.ours;
    } else {
      EXPECT_FALSE(word.remark.empty()) << word.theirs;
      EXPECT_TRUE(word.ours.empty()) << word.theirs;
    }
    EXPECT_EQ(word.how == How::kWhenOn, !word.text.empty()) << word.theirs;
    EXPECT_FALSE(word.remark.ends_with('.')) << word.theirs << ": a remark follows a colon";
  }
}

TEST(Words, AProjectHasAWordOnce) {
  for (const auto& table :
       {slips(), trainer_words(), task_words(), peft_words(), axolotl_words(), axolotl_task_words(),
        llama_factory_words(), torchtune_words(), unsloth_words(), deepspeed_words(), accelerate_words()}) {
    std::set<std::string_view> seen;
    for (const Word& word : table) EXPECT_TRUE(seen.insert(word.theirs).second) << word.theirs;
  }
}

// What every project's examples and guides have, each in a configuration of ours.
TEST(Words, EachGetsAnAnswerInAConfiguration) {
  for (const char* word : {"fp16",
                           "bf16",
                           "tf32",
                           "torch_dtype",
                           "torch_compile",
                           "torch_compile_backend",
                           "torch_empty_cache_steps",
                           "dataloader_pin_memory",
                           "dataloader_num_workers",
                           "save_strategy",
                           "adam_beta1",
                           "adam_beta2",
                           "logging_steps",
                           "enable_activation_checkpointing",
                           "enable_activation_offloading",
                           "offload_with_streams",
                           "optimizer_in_bwd",
                           "lora_rank",
                           "lora_attn_modules",
                           "apply_lora_to_mlp",
                           "apply_lora_to_output",
                           "log_every_n_steps",
                           "run_name",
                           "load_in_4bit",
                           "load_in_8bit",
                           "bnb_4bit_quant_type",
                           "bnb_4bit_compute_dtype",
                           "bnb_4bit_use_double_quant",
                           "use_liger_kernel",
                           "loss_type",
                           "attn_implementation",
                           "deepspeed",
                           "fsdp",
                           "report_to",
                           "use_dora",
                           "modules_to_save",
                           "trainable_token_indices",
                           "assistant_only_loss",
                           "completion_only_loss",
                           "padding_free",
                           "packing_strategy",
                           "eval_packing",
                           "neat_packing",
                           "sample_packing",
                           "pad_to_sequence_len",
                           "push_to_hub",
                           "hub_token",
                           "flash_attention",
                           "micro_batch_size",
                           "sequence_len",
                           "cutoff_len",
                           "finetuning_type",
                           "quantization_bit",
                           "use_gradient_checkpointing",
                           "random_state",
                           "num_train_epochs",
                           "wandb_project",
                           "zero_optimization",
                           "gradient_checkpointing_kwargs",
                           "neftune_noise_alpha",
                           "val_set_size",
                           "chat_template_jinja"}) {
    const std::string report = report_of(std::string(kLeast) + "[train]\n" + word + " = 1\n");
    const bool answered = report.find("did you mean") != std::string::npos ||
                          report.find("not needed here") != std::string::npos ||
                          report.find("not in lmlaunch") != std::string::npos ||
                          report.find("it belongs to [") != std::string::npos;
    EXPECT_TRUE(answered) << report;
  }
}

TEST(Words, AnAnswerIsTheWordsOwnAndNotTheNearestKey) {
  const std::string qalora = report_of(std::string(kLeast) + "[lora]\nuse_qalora = true\n");
  EXPECT_HAS(qalora, "unknown key `use_qalora` in [lora]; not in lmlaunch: ");
  EXPECT_EQ(qalora.find("did you mean"), std::string::npos) << qalora;
  EXPECT_HAS(report_of(std::string(kLeast) + "[lora]\nuse_dora = true\n"), "did you mean `lora.dora`?");
  EXPECT_HAS(report_of("[model]\ntf32 = true\n"), "did you mean `model.products = \"tf32\"`?");
  EXPECT_HAS(report_of(std::string(kLeast) + "[train]\ngradient_checkpointing = true\n"),
             "did you mean `train.recompute`?");
  EXPECT_HAS(report_of("[model]\nload_in_4bit = true\n"),
             "did you mean `model.quantize = \"nf4\"`? (with train.method");
  // A table of another's, a key outside of a table, one of a pattern, one on the command line.
  EXPECT_HAS(report_of(std::string(kLeast) + "[deepspeed]\nstage = 1\n"), "did you mean `zero.stage`?");
  EXPECT_HAS(report_of("bf16 = true\n" + std::string(kLeast)), "did you mean `model.dtype = \"bf16\"`?");
  EXPECT_HAS(report_of(std::string(kLeast) + "[log]\nwandb_entity = \"me\"\n"),
             "not needed here: log.to names the tracker");
  // A slip of ours is no word of a pattern that begins alike.
  EXPECT_HAS(report_of(std::string(kLeast) + "[io]\ntimeouts = 3\n"), "did you mean `timeout`?");
}

TEST(Words, TheirFilesAreTold) {
  const std::pair<const char*, Project> files[] = {
      {R"({"base_model": "m"})", Project::kAxolotl},
      {R"({"model_name_or_path": "m", "stage": "sft"})", Project::kLlamaFactory},
      {R"({"model": {"_component_": "torchtune.models.llama3.llama3_8b"}})", Project::kTorchtune},
      {R"({"zero_optimization": {"stage": 2}})", Project::kDeepSpeed},
      {R"({"compute_environment": "LOCAL_MACHINE"})", Project::kAccelerate},
      {R"({"peft_type": "LORA", "r": 8})", Project::kPeft},
      {R"({"learning_rate": 1e-5, "per_device_train_batch_size": 2})", Project::kTrainer}};
  for (const auto& [text, project] : files) EXPECT_EQ(project_of(Json::parse(text)), project) << text;
}

TEST(Translate, CarriesNumbersOverAsTheyAre) {
  // YAML hands 2e-5 over as text.
  const Translated done =
      translated(R"({"model_name_or_path": "m", "dataset_name": "org/data", "learning_rate": "2e-5",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_train_epochs": 1.0, "warmup_steps": 0,
    "warmup_ratio": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0, "save_steps": 0.2, "logging_steps": 10,
    "report_to": ["wandb", "tensorboard"], "seed": 7, "fp16": true, "packing": true, "max_length": 1024})");
  EXPECT_EQ(value_of(done, "optimizer.lr"), "2e-05");
  EXPECT_EQ(value_of(done, "train.micro_batch"), "2");
  EXPECT_EQ(value_of(done, "train.global_batch"), "16");
  EXPECT_TRUE(done.of_one_device);
  EXPECT_EQ(value_of(done, "train.epochs"), "1");
  EXPECT_EQ(value_of(done, "optimizer.warmup"), "0.1");
  EXPECT_EQ(value_of(done, "optimizer.betas"), "[0.9, 0.95]");
  EXPECT_EQ(value_of(done, "optimizer.clip"), "\"none\"");
  EXPECT_EQ(value_of(done, "checkpoint.every"), "");
  EXPECT_HAS(why(done.missing, "save_steps"), "a share of the run");
  EXPECT_EQ(value_of(done, "model.dtype"), "\"fp16\"");
  EXPECT_EQ(value_of(done, "log.to"), R"(["tensorboard", "wandb"])");
  EXPECT_EQ(value_of(done, "data.packing"), "true");
  EXPECT_EQ(value_of(done, "data.train"), "[\"org/data\"]");
  EXPECT_TRUE(done.unknown.empty());
}

TEST(Translate, TakesTheDefaultsThatAreNotOurs) {
  const Translated trainer = translated(R"({"learning_rate": 1e-5})", "m", {"a.jsonl"});
  EXPECT_EQ(value_of(trainer, "train.epochs"), "3");
  const Translated tune =
      translated(R"({"model": {"_component_": "torchtune.models.llama3.llama3_8b"}, "batch_size": 2,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-5}, "clip_grad_norm": null})",
                 "m", {"a.jsonl"});
  EXPECT_EQ(value_of(tune, "optimizer.schedule"), "\"constant\"");
  EXPECT_EQ(value_of(tune, "optimizer.weight_decay"), "0.01");
  EXPECT_EQ(value_of(tune, "optimizer.clip"), "\"none\"");
  EXPECT_EQ(value_of(tune, "train.method"), "\"full\"");
  const Translated factory =
      translated(R"({"stage": "sft", "lora_rank": 64, "learning_rate": 1e-5})", "m", {"a.jsonl"});
  EXPECT_EQ(value_of(factory, "lora.alpha"), "128");
  EXPECT_EQ(value_of(factory, "train.method"), "\"lora\"");
}

TEST(Translate, NamesWhatAConfigurationRefusesWithItsReason) {
  const Translated done = translated(R"({"base_model": "m", "datasets": [{"path": "org/d", "type": "alpaca"}],
    "optimizer": "rmsprop", "eval_steps": 20, "load_in_4bit": true, "micro_batch_size": 1, "lora_r": 8})");
  EXPECT_HAS(why(done.missing, "optimizer"), "expected one of");
  EXPECT_HAS(why(done.missing, "eval_steps"), "needs something to evaluate");
  EXPECT_HAS(why(done.missing, "load_in_4bit"), "train.method = \"full\"");
  EXPECT_HAS(why(done.unneeded, "lora_r"), "all weights are trained");
  EXPECT_EQ(value_of(done, "lora.r"), "");
}

TEST(Translate, ReadsWhichModulesAnAdapterIsOn) {
  const Translated done = translated(R"({"peft_type": "LORA", "base_model_name_or_path": "m", "r": 4,
    "target_modules": ".*\\.(q|v)_proj", "exclude_modules": ["k_proj"], "layers_to_transform": 0,
    "rank_pattern": {"q_proj": 8, "layers\\.[01]\\..*": 2}, "alpha_pattern": {"(?P<x>q)_proj": 1}})",
                                     "", {"a.jsonl"});
  EXPECT_EQ(value_of(done, "lora.targets"), R"(["regex:^(?:.*\\.(q|v)_proj)$"])");
  EXPECT_EQ(value_of(done, "lora.exclude"), R"(["k_proj"])");
  EXPECT_EQ(value_of(done, "lora.layers"), "[0]");
  EXPECT_EQ(value_of(done, "lora.ranks"), R"({"regex:(?:^|[.])(?:layers\\.[01]\\..*)$" = 2, "q_proj" = 8})");
  EXPECT_HAS(why(done.missing, "alpha_pattern"), "lora.alphas takes names");
}

TEST(Translate, ReadsWhichMethodOfPeftsAFileIsOf) {
  const std::pair<const char*, const char*> methods[] = {{"LORA", "lora"},
                                                         {"IA3", "ia3"},
                                                         {"LN_TUNING", "norms"},
                                                         {"PREFIX_TUNING", "prefix"},
                                                         {"PROMPT_TUNING", "prompt"},
                                                         {"P_TUNING", "ptuning"}};
  for (const auto& [theirs, ours] : methods) {
    const Translated done = translated(std::string(R"({"peft_type": ")") + theirs +
                                           R"(", "num_virtual_tokens": 7, "encoder_hidden_size": 48})",
                                       "m", {"a.jsonl"});
    const bool virtual_tokens = std::string(ours).starts_with("p"), encoder = std::string(ours) == "ptuning";
    EXPECT_EQ(value_of(done, "train.method"), '"' + std::string(ours) + '"');
    EXPECT_EQ(value_of(done, "prompt.length"), virtual_tokens ? "7" : "") << theirs;
    EXPECT_EQ(value_of(done, "prompt.hidden"), encoder ? "48" : "") << theirs;
  }
}

TEST(Translate, ReadsTheDataOfSeveralEntries) {
  const Translated one = translated(R"({"base_model": "m", "datasets": [
    {"path": "org/a", "type": "chat_template", "field_messages": "dialogue"}, {"path": "json", "data_files": ["b.json", "c.json"]}]})");
  EXPECT_EQ(value_of(one, "data.train"), "[\"org/a\", \"b.json\", \"c.json\"]");
  EXPECT_EQ(value_of(one, "data.columns"), "{messages = \"dialogue\"}");
  const Translated weighted = translated(R"({"model_name_or_path": "m", "learning_rate": 1e-5,
    "dataset_mixture": {"datasets": [{"id": "org/a", "weight": 0.5}, {"id": "org/b", "split": "test"}]}})");
  EXPECT_EQ(value_of(weighted, "data.weights"), "[0.5, 1.0]");
  EXPECT_HAS(why(weighted.missing, "dataset_mixture.datasets.split"), "\"test\"");
  const Translated named =
      translated(R"({"stage": "sft", "model_name_or_path": "m", "dataset": "identity, org/d"})");
  EXPECT_EQ(value_of(named, "data.train"), "[\"data/identity.json\", \"org/d\"]");
}

TEST(Translate, ShardsInsideMachinesAreAGroup) {
  const auto translated = [](const char* strategy) {
    const Json recipe = Json::parse(R"({"base_model": "m", "datasets": [{"path": "org/d"}]})");
    Json launcher = Json::parse(R"({"compute_environment": "LOCAL_MACHINE", "num_processes": 4})");
    launcher["fsdp_config"]["fsdp_sharding_strategy"] = strategy;
    return translate({{"a.json", recipe}, {"b.json", launcher}}, "", {});
  };
  EXPECT_EQ(value_of(translated("HYBRID_SHARD"), "zero.group"), "\"machine\"");
  EXPECT_EQ(value_of(translated("HYBRID_SHARD"), "zero.stage"), "3");
  EXPECT_EQ(value_of(translated("HYBRID_SHARD_ZERO2"), "zero.stage"), "2");
  EXPECT_EQ(value_of(translated("SHARD_GRAD_OP"), "zero.stage"), "2");
  EXPECT_EQ(value_of(translated("FULL_SHARD"), "zero.stage"), "3");
}

TEST(Translate, AddsAFileOfHardwareToARecipe) {
  const Json recipe =
      Json::parse(R"({"base_model": "m", "datasets": [{"path": "org/d"}], "micro_batch_size": 2,
    "gradient_accumulation_steps": 4, "deepspeed": "zero3.json"})");
  const Json hardware =
      Json::parse(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme",
    "nvme_path": "/nvme0/swap"}, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0.5,
    "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}})");
  const Json launcher = Json::parse(R"({"compute_environment": "LOCAL_MACHINE", "num_processes": 4})");
  const Translated done = translate({{"a.json", recipe}, {"b.json", hardware}, {"c.json", launcher}}, "", {});
  EXPECT_EQ(value_of(done, "zero.stage"), "3");
  EXPECT_EQ(value_of(done, "offload.optimizer"), "\"nvme\"");
  EXPECT_EQ(value_of(done, "offload.paths"), "[\"/nvme0/swap\"]");
  EXPECT_EQ(value_of(done, "offload.weights"), "\"host\"");
  EXPECT_EQ(value_of(done, "train.max_grad_norm"), "0.5");
  EXPECT_EQ(value_of(done, "train.global_batch"), "32");  // of 4 processes
  EXPECT_FALSE(done.of_one_device);
}

TEST(Translate, FollowsReferencesInARecipe) {
  const Translated done = translated(
      R"({"output_dir": "/runs/x", "model": {"_component_": "torchtune.models.qwen2.lora_qwen2_0_5b",
    "lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": true}, "checkpointer": {"_component_": "c",
    "checkpoint_dir": "${output_dir}/${no.such}/base"}, "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"}})");
  EXPECT_EQ(value_of(done, "model.path"), "\"/runs/x/${no.such}/base\"");
  EXPECT_EQ(value_of(done, "lora.targets"),
            "[\"gate_proj\", \"up_proj\", \"down_proj\", \"q_proj\", \"o_proj\"]");
  EXPECT_EQ(value_of(done, "train.method"), "\"lora\"");
}

TEST(Translate, RefusesAnotherTaskAndAFileThatNamesNothing) {
  const auto refusal = [](const std::string& json) {
    try {
      translated(json);
    } catch (const Error& error) {
      return std::to_string(static_cast<int>(error.code())) + " " + error.report();
    }
    return std::string("nothing");
  };
  EXPECT_HAS(refusal(R"({"base_model": "m", "rl": "dpo"})"), "rl: preference tuning");
  EXPECT_HAS(refusal(R"({"base_model": "m", "rl": null, "datasets": []})"), "nothing names data.train");
  EXPECT_HAS(refusal(R"({"stage": "dpo", "model_name_or_path": "m"})"), "stage \"dpo\"");
  EXPECT_HAS(refusal(R"({"stage": "rm", "model_name_or_path": "m"})"), "see train.objective");
  EXPECT_HAS(refusal(R"({"zero_optimization": {"stage": 2}})"), "nothing names model.path");
  EXPECT_HAS(refusal("[1]"), "no keys at its top level");
  EXPECT_EQ(translated(R"({"base_model": "m", "no_such_word": 1})", "", {"a"}).unknown,
            std::vector<std::string>{"no_such_word"});
}

// All words of a project at once, each with the same value: each is in the result, whatever becomes of it.
TEST(Translate, NoValueOfAnyWordIsLost) {
  const Json values[] = {nullptr,
                         true,
                         false,
                         0,
                         1,
                         -1,
                         0.5,
                         1e30,
                         "",
                         "none",
                         "auto",
                         "a",
                         "lora",
                         "2e-5",
                         Json::array(),
                         Json::array({"a", 1}),
                         Json::object(),
                         Json::object({{"x", 1}})};
  for (const char* file : {R"({"base_model": "m"})", R"({"stage": "sft"})", R"({"a": {"_component_": "c"}})",
                           R"({"learning_rate": 1})", R"({"zero_optimization": 1})",
                           R"({"distributed_type": "NO"})", R"({"peft_type": "LORA"})"}) {
    const Project project = project_of(Json::parse(file));
    for (const Json& value : values) {
      Json content = Json::parse(file);
      for (const Word& word : all_words()) {
        const std::string theirs(word.theirs);
        const bool plain = theirs.find_first_of(".*") == std::string::npos && !content.contains(theirs);
        const Word* found = find_word(project, theirs);
        if (!plain || found == nullptr || found->fate == Fate::kRefused || found->how == How::kStage)
          continue;
        content[theirs] = value;
        if (project_of(content) != project) content.erase(theirs);
      }
      const Translated done = translate({{"f", content}}, "m", {"d.jsonl"});
      std::set<std::string> named(done.off.begin(), done.off.end());
      named.insert(done.unknown.begin(), done.unknown.end());
      for (const auto& left : done.missing) named.insert(left.theirs);
      for (const auto& left : done.unneeded) named.insert(left.theirs);
      for (const auto& setting : done.settings) named.insert(setting.from.begin(), setting.from.end());
      for (const auto& [theirs, ignored] : content.items()) {
        const bool inner = find_word(project, theirs) == nullptr || value.is_object() || theirs == "a";
        EXPECT_TRUE(inner || named.count(theirs)) << theirs << " = " << value.dump() << " is lost";
      }
    }
  }
}

}  // namespace
}  // namespace lm
