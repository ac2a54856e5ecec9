#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "config/config_toml.h"
#include "launcher/built_in_models.h"
#include "launcher/cli/commands.h"

namespace lm {
namespace {

TEST(Presets, EachIsAValidConfigurationThatSaysWhatItIsFor) {
  ASSERT_GE(presets().size(), 4u);
  for (const Preset& preset : presets()) {
    EXPECT_TRUE(preset.text.starts_with("# ")) << preset.name;
    EXPECT_NO_THROW(parse_config(preset.text, preset.name)) << preset.name;
  }
}

// The number before "gb" at the end of a preset's name; 0: it has none.
int gigabytes_of(const std::string& name) {
  const size_t at = name.rfind('-');
  return at != std::string::npos && name.ends_with("gb") ? std::atoi(name.c_str() + at + 1) : 0;
}

// Memory of the machine around a card, as such machines come.
int64_t host_gigabytes(int card) {
  return card <= 12 ? 32 : card <= 24 ? 64 : card == 48 ? 128 : 256;
}

TEST(Presets, EachIsPlannedWithoutItsModelAndFitsTheMemoryThatItIsNamedAfter) {
  constexpr int64_t kGigabyte = 1'000'000'000;
  const Environment nothing;
  int sized = 0;
  std::set<int> cards;
  for (const Preset& preset : presets()) {
    SCOPED_TRACE(preset.name);
    const Config config = parse_config(preset.text, preset.name);
    if (config.model.path.starts_with("build/")) continue;  // made by the quickstart itself
    const PlannedModel model = open_model(config, nothing, model_shapes());
    EXPECT_EQ(model.directory, "");
    EXPECT_GT(model.layout.trainable_elements, 0);
    const int size = gigabytes_of(preset.name);
    if (size == 0) continue;
    ++sized;
    const bool cpu = preset.name.find("-cpu-") != std::string::npos;
    EXPECT_EQ(config.run.device, cpu ? DeviceChoice::kCpu : DeviceChoice::kCuda);
    EXPECT_LE(config.data.max_length, model.spec.max_positions);
    Machine machine;
    machine.cores = 8;
    machine.host_memory = (cpu ? size : host_gigabytes(size)) * kGigabyte;
    if (!cpu) {
      machine.gpus.resize(1);
      machine.gpus[0].memory_bytes = size * kGigabyte;
      cards.insert(size);
    }
    const Plan plan = draft_plan(model.inputs(config, cpu ? DeviceType::kCpu : DeviceType::kCuda), machine);
    EXPECT_TRUE(plan.fits);
    EXPECT_FALSE(plan.placement.on_disk());
  }
  EXPECT_GE(sized, 60);
  EXPECT_EQ(cards, (std::set<int>{8, 12, 16, 24, 48, 80}));
}

Plan plan_of(const std::string& name, const Machine& machine) {
  const auto preset = std::ranges::find(presets(), name, &Preset::name);
  EXPECT_NE(preset, presets().end()) << name;
  const Config config = parse_config(preset->text, name);
  return draft_plan(open_model(config, {}, model_shapes()).inputs(config, DeviceType::kCuda), machine);
}
Machine gpu_of(int64_t gib, int64_t host_gib) {
  Machine machine;
  machine.cores = 8;
  machine.host_memory = host_gib << 30;
  machine.gpus.resize(1);
  machine.gpus[0].memory_bytes = gib << 30;
  return machine;
}
int64_t bytes_at(const Plan& plan, TierId at) {
  const auto tier = std::ranges::find(plan.tiers, at, &Tier::tier_id);
  return tier == plan.tiers.end() ? 0 : tier->bytes;
}

int64_t row_at(const Plan& plan, std::string_view name, TierId at) {
  int64_t bytes = 0;
  for (const ClassBytes& row : plan.classes)
    if (row.name == name && row.tier_id == at) bytes += row.bytes;
  return bytes;
}

// A mixture's base is in host memory; of what a block needs the GPU has some at a time.
TEST(Presets, QloraOf30BillionParametersTakesLessThan7GiBOfAGpu) {
  const Plan plan = plan_of("qwen3-30b-a3b-qlora-8gib", gpu_of(8, 32));
  EXPECT_TRUE(plan.fits);
  EXPECT_FALSE(plan.placement.on_disk());
  EXPECT_LE(bytes_at(plan, TierId::kDevice), int64_t{7} << 30);
  const int64_t of_host = row_at(plan, "frozen experts", TierId::kHost);
  const int64_t experts = of_host + row_at(plan, "frozen experts", TierId::kDevice);
  EXPECT_GT(experts, int64_t{13} << 30);
  EXPECT_LT(experts, int64_t{15} << 30);
  EXPECT_GT(of_host, experts / 2);
  EXPECT_EQ(plan.step.group, 16) << "a block comes once for all sequences of a step";
}

TEST(Presets, AdaptersOfGptOssKeepItsCodesOnACardOf12GiB) {
  const Plan plan = plan_of("gpt-oss-20b-qlora-12gib", gpu_of(12, 32));
  EXPECT_TRUE(plan.fits);
  EXPECT_FALSE(plan.placement.on_disk());
  const int64_t of_host = row_at(plan, "frozen experts", TierId::kHost);
  const int64_t of_gpu = row_at(plan, "frozen experts", TierId::kDevice);
  EXPECT_GT(of_gpu, 0) << "as much as fits";
  EXPECT_GT(of_host, 0);
  // 4.25 bits a weight.
  EXPECT_NEAR(static_cast<double>(of_host + of_gpu), 19.11e9 * 4.25 / 8, 0.03e9);
  EXPECT_EQ(plan.step.group, 16) << "a block comes once for all sequences of a step";
}

TEST(Presets, AllWeightsOfThemFitOnACardOf24GiBWithADrive) {
  Machine machine = gpu_of(24, 64);
  machine.disks = {{"/nvme/scratch", int64_t{400} * 1'000'000'000, 3e9, 2e9}};
  const Plan plan = plan_of("qwen3-30b-a3b-full", machine);
  EXPECT_TRUE(plan.fits);
  EXPECT_TRUE(plan.placement.on_disk());
  machine.disks[0].free_bytes /= 4;
  EXPECT_FALSE(plan_of("qwen3-30b-a3b-full", machine).fits);
}

// A machine without a GPU, with so little memory, and a large drive.
Machine drive_and(int64_t gib) {
  Machine machine;
  machine.cores = 2;
  machine.host_memory = gib << 30;
  machine.disks = {{"/nvme", int64_t{400} * 1'000'000'000, 3e9, 2e9}};
  return machine;
}

// One sequence on the CPU, with the weights on a drive. Bytes without the libraries'.
int64_t planned_on_a_drive(const std::string& model, std::vector<std::string> settings,
                           const Machine& machine) {
  settings.insert(settings.end(), {"train.global_batch=1", "train.micro_batch=1", "train.recompute=block",
                                   "offload.weights=nvme", "run.device=cpu"});
  const Config config = parse_config(
      "[model]\npath = \"" + model + "\"\n[data]\ntrain = [\"none\"]\n[offload]\npaths = [\"/nvme\"]\n",
      "test", settings);
  const Plan plan =
      draft_plan(open_model(config, {}, model_shapes()).inputs(config, DeviceType::kCpu), machine);
  EXPECT_TRUE(plan.fits) << model;
  EXPECT_TRUE(plan.placement.on_disk()) << model;
  return plan.peak.host - row_at(plan, "libraries", TierId::kHost);
}

// benchmarks/experts_memory.py measures them.
TEST(Mixtures, TrainInAFewGiBWithTheirWeightsOnADrive) {
  const double gib = 1 << 30;
  const std::string qwen = "Qwen/Qwen3-30B-A3B", oss = "openai/gpt-oss-20b";
  const std::string attention = R"(lora.targets=["q_proj","k_proj","v_proj","o_proj"])";
  const auto planned = [](const std::string& model, const std::vector<std::string>& settings) {
    return static_cast<double>(planned_on_a_drive(model, settings, drive_and(8)));
  };
  EXPECT_LE(planned(qwen, {"train.method=qlora", attention, "lora.r=16", "data.max_length=256"}), 4 * gib);
  EXPECT_LE(planned(qwen, {"train.method=qlora", "lora.experts=true", "lora.r=4", "data.max_length=256",
                           "offload.optimizer=nvme"}),
            6 * gib);
  EXPECT_LE(planned(oss, {"train.method=lora", attention, "lora.r=16", "data.max_length=256"}), 4.5 * gib);
  // All 48 layers, all weights: 114 GiB on the drive.
  EXPECT_LE(planned(qwen, {"train.method=full", "data.max_length=64", "offload.optimizer=nvme",
                           "train.gradients=bf16", "train.update=in_backward", "optimizer.name=adamw_8bit",
                           "optimizer.master=none", "optimizer.clip=block"}),
            8 * gib);
}

// Parameters as their publishers count them.
TEST(ModelShapes, HaveTheSizesOfTheModelsThatTheyAreNamedAfter) {
  EXPECT_GE(built_in_models().size(), 50U);
  EXPECT_EQ(built_in_models().size(), model_shapes().size());
  for (size_t i = 0; i < built_in_models().size(); ++i) {
    const ModelShape& shape = model_shapes()[i];
    const ModelSpec spec = parse_model_spec(shape.config, shape.name);
    EXPECT_EQ(shape.name, built_in_models()[i].name);
    EXPECT_EQ(make_layout(spec, nullptr, DType::kBF16).trainable_elements, built_in_models()[i].parameters)
        << shape.name;
  }
}

// What a plan's numbers follow from beyond sizes: each family's own keys reach the spec.
TEST(ModelShapes, HaveTheirFamilysKeys) {
  const auto spec_of = [](const std::string& name) {
    const auto& shapes = model_shapes();
    const auto shape = std::ranges::find(shapes, name, &ModelShape::name);
    EXPECT_NE(shape, shapes.end()) << name;
    return parse_model_spec(shape->config, shape->name);
  };
  EXPECT_EQ(spec_of("google/gemma-3-270m").layers[0].attention().window, 512);
  EXPECT_EQ(spec_of("google/gemma-3-270m").layers[5].attention().window, 0);
  EXPECT_EQ(spec_of("google/gemma-4-31B").layers[5].attention().kv_heads, 4);
  EXPECT_EQ(spec_of("google/gemma-4-31B").embedding.inputs.width, 0);
  EXPECT_TRUE(spec_of("google/gemma-4-12B").layers[47].attention().values_are_keys);
  EXPECT_EQ(spec_of("google/gemma-4-12B").layers[0].attention().window, 1024);
  EXPECT_EQ(spec_of("google/gemma-4-E2B").layers[33].attention().source, 13);
  EXPECT_EQ(spec_of("google/gemma-4-E2B").layers[34].mlp().ffn, 2 * 6144);
  EXPECT_EQ(spec_of("google/gemma-4-E4B").layers[41].attention().source, 23);
  EXPECT_EQ(spec_of("google/gemma-4-E4B").ropes.size(), 2U);
  EXPECT_DOUBLE_EQ(spec_of("google/gemma-2-27b").layers[0].attention().softmax_scale, 1.0 / 12);
  EXPECT_EQ(spec_of("microsoft/Phi-4-mini-instruct").ropes[0].dim, 96);
  EXPECT_EQ(spec_of("microsoft/Phi-3-mini-4k-instruct").layers[0].attention().window, 2047);
  EXPECT_DOUBLE_EQ(spec_of("ibm-granite/granite-3.3-2b-base").layers[0].attention().softmax_scale, 1.0 / 64);
  EXPECT_DOUBLE_EQ(spec_of("ibm-granite/granite-3.3-8b-base").head.logit_scale, 1.0 / 16);
  EXPECT_EQ(spec_of("openai-community/gpt2-xl").embedding.positions, 1024);
  EXPECT_TRUE(spec_of("zai-org/GLM-4-9B-0414").layers[0].attention().qkv_bias);
  EXPECT_EQ(spec_of("CohereLabs/c4ai-command-r7b-12-2024").head.logit_scale, 0.25);
  const ModelSpec oss = spec_of("openai/gpt-oss-20b");
  EXPECT_EQ(oss.stored, EncodingKind::kMxfp4);
  EXPECT_EQ(oss.layers[0].attention().window, 128);
  EXPECT_EQ(oss.layers[1].attention().window, 0);
}

TEST(ModelShapes, ServeWhatWasTunedFromThem) {
  Config config;
  config.data.max_length = 512;  // GPT-2 has an embedding for 1024 positions
  for (const auto& [name, hidden] : {std::pair("meta-llama/Llama-3.2-1B-Instruct", 2048),
                                     {"mistralai/Mistral-7B-Instruct-v0.3", 4096},
                                     {"mistralai/Mistral-Nemo-Instruct-2407", 5120},
                                     {"Qwen/Qwen2.5-Coder-7B-Instruct", 3584},
                                     {"Qwen/Qwen3-8B-Base", 4096},
                                     {"meta-llama/Llama-2-7b-chat-hf", 4096},
                                     {"tiiuae/Falcon3-7B-Instruct", 3072},
                                     {"Qwen/Qwen3-4B-Instruct-2507", 2560},
                                     {"Qwen/Qwen3-30B-A3B-Base", 2048},
                                     {"google/gemma-2-9b-it", 3584},
                                     {"google/gemma-3-1b-it", 1152},
                                     {"google/gemma-4-E4B-it", 2560},
                                     {"ibm-granite/granite-3.3-8b-instruct", 4096},
                                     {"allenai/OLMo-2-1124-13B-Instruct", 5120},
                                     {"openai-community/gpt2-xl", 1600}}) {
    config.model.path = name;
    EXPECT_EQ(open_model(config, {}, model_shapes()).spec.hidden, hidden) << name;
  }
}

// Beyond a table of learned positions there is nothing to look up.
TEST(PlannedModel, RefusesTextsLongerThanItsTableOfPositions) {
  Config config;
  config.model.path = "gpt";
  ModelSpec spec;
  config.data.max_length = 1 << 20;
  EXPECT_NO_THROW(require_positions(config, spec)) << "RoPE goes on";
  spec.embedding.positions = 1024;
  config.data.max_length = 1024;
  EXPECT_NO_THROW(require_positions(config, spec));
  config.data.max_length = 1025;
  try {
    require_positions(config, spec);
    ADD_FAILURE() << "a longer text is accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    EXPECT_NE(error.report().find("a text of 1025 tokens"), std::string::npos) << error.report();
    EXPECT_NE(error.report().find("data.max_length = 1024"), std::string::npos) << error.report();
  }
}

// A position without a row of the table would be read from behind it.
TEST(ModelShapes, TextsAreNoLongerThanATableOfLearnedPositions) {
  const std::vector<ModelShape> known = {
      {"some/gpt2", R"({"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64,
                        "vocab_size": 30})"}};
  Config config;
  config.model.path = "some/gpt2";
  config.data.max_length = 64;
  EXPECT_EQ(open_model(config, {}, known).spec.embedding.positions, 64);
  config.data.max_length = 65;
  try {
    open_model(config, {}, known);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    EXPECT_NE(error.report().find("a text of 65 tokens"), std::string::npos);
  }
}

TEST(ModelShapes, StandInOnlyForModelsThatAreNotHere) {
  Config config;
  config.model.path = "meta-llama/Llama-3.1-9B";
  EXPECT_THROW(open_model(config, {}, model_shapes()), Error);
  // A directory of that name is the model that is meant, whole or not.
  const auto before = std::filesystem::current_path();
  const auto work = std::filesystem::path(::testing::TempDir()) / "shapes_test";
  std::filesystem::create_directories(work / "meta-llama" / "Llama-3.1-8B");
  std::filesystem::current_path(work);
  config.model.path = "meta-llama/Llama-3.1-8B";
  EXPECT_THROW(open_model(config, {}, model_shapes()), Error);
  std::filesystem::current_path(before);
  std::filesystem::remove_all(work);
}

}  // namespace
}  // namespace lm
