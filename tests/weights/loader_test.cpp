#include "weights/loader.h"

#include "export/export_model.h"
#include "tests/weights/support.h"
#include "weights/verify.h"

namespace lm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::contains;
using test::refusal;
using test::TemporaryDirectory;

// A whole model in one vector per parameter.
struct Loaded {
  std::map<std::string, std::vector<std::byte>> memory;
  DType dtype = DType::kF32;
  LoadTarget target(const TensorPlace& place) {
    auto& bytes = memory[place.parameter.name];
    bytes.assign(static_cast<size_t>(place.parameter.elements()) * dtype_size(dtype), std::byte{0x5A});
    return {bytes.data(), dtype};
  }
  WeightView view(const TensorPlace& place) const { return {memory.at(place.parameter.name).data(), dtype}; }
};

Loaded load(const std::string& directory, const ModelSpec& spec, DType dtype, int threads = 1) {
  Loaded loaded;
  loaded.dtype = dtype;
  const ModelLayout layout = make_layout(spec, nullptr, dtype);
  load_model(ModelFiles(directory), spec, layout,
             [&](size_t, const TensorPlace& place) { return loaded.target(place); }, {.threads = threads});
  return loaded;
}

// Every part of every parameter holds its own tensor's values.
void expect_tiny_values(const Loaded& loaded, const ModelSpec& spec) {
  for (const BlockParameters& block : list_parameters(spec, nullptr)) {
    for (const Parameter& parameter : block.trainable) {
      const auto& bytes = loaded.memory.at(parameter.name);
      const size_t size = dtype_size(loaded.dtype);
      ASSERT_EQ(bytes.size(), static_cast<size_t>(parameter.elements()) * size);
      for (const ParameterPart& part : parameter.parts) {
        for (int64_t i = 0; i < part.rows * parameter.columns; ++i) {
          uint32_t bits = 0;
          std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size,
                      bytes.data() + static_cast<size_t>(part.first * parameter.columns + i) * size, size);
          float value = 0;
          std::memcpy(&value, &bits, 4);
          ASSERT_EQ(value, test::tiny_value(part.name, i)) << part.name << " " << i;
        }
      }
    }
  }
}

TEST(Loader, PutsEveryTensorIntoItsRowsInEitherType) {
  const TemporaryDirectory directory;
  for (const char* type : {"llama", "qwen2", "qwen3", "mistral"}) {
    for (const bool tied : {false, true}) {
      for (const DType stored : {DType::kF32, DType::kBF16}) {
        json config = test::tiny_config(type, tied);
        config["attention_bias"] = std::string(type) == "llama" || std::string(type) == "qwen3";
        const ModelSpec spec = test::write_tiny_model(directory.path(), config, stored);
        expect_tiny_values(load(directory.path(), spec, DType::kF32), spec);
        expect_tiny_values(load(directory.path(), spec, DType::kBF16, 3), spec);
      }
    }
  }
}

TEST(Loader, ReadsTensorsOfManyChunksWithManyThreads) {
  const TemporaryDirectory directory;
  json config = test::tiny_config();
  config["vocab_size"] = 200003;  // 9.6 MB in fp32: three chunks
  const ModelSpec spec = test::write_tiny_model(directory.path(), config, DType::kF32);
  Loaded loaded;
  loaded.dtype = DType::kBF16;
  const int64_t bytes =
      load_model(ModelFiles(directory.path()), spec, make_layout(spec, nullptr, DType::kBF16),
                 [&](size_t, const TensorPlace& place) { return loaded.target(place); }, {.threads = 4});
  EXPECT_EQ(bytes, 4 * make_layout(spec, nullptr, DType::kF32).trainable_elements);
  expect_tiny_values(loaded, spec);
}

TEST(Loader, ANullTargetIsCheckedAndNotRead) {
  const TemporaryDirectory directory;
  const ModelSpec spec = test::write_tiny_model(directory.path(), test::tiny_config(), DType::kF32);
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const auto nothing = [](size_t, const TensorPlace&) { return LoadTarget{}; };
  EXPECT_EQ(load_model(ModelFiles(directory.path()), spec, layout, nothing, {}), 0);
}

// A rank's experts alone are read; the files have all of them nevertheless.
TEST(Loader, ExpertsOfOtherRanksAreCheckedAndNotRead) {
  const TemporaryDirectory directory;
  json config = test::tiny_config("qwen3_moe");
  config.update({{"num_experts", 4}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 8}});
  const ModelSpec spec = test::write_tiny_model(directory.path(), config, DType::kF32);
  const AdapterSpec adapter{.r = 2, .alpha = 4, .targets = {"q_proj"}};
  const auto layout_of = [&](int rank) {
    return make_layout(spec, &adapter, DType::kF32, nullptr, {}, ExpertShare{2, rank});
  };
  const ModelLayout whole = make_layout(spec, &adapter, DType::kF32);
  std::map<std::string, std::vector<std::byte>> all;
  int64_t read = 0, others = 0;
  for (const int rank : {0, 1}) {
    Loaded loaded;
    const ModelLayout layout = layout_of(rank);
    EXPECT_EQ(layout.frozen_elements, whole.frozen_elements);
    EXPECT_EQ(layout.frozen_bytes, layout_of(0).frozen_bytes);
    read += load_model(ModelFiles(directory.path()), spec, layout,
                       [&](size_t, const TensorPlace& place) { return loaded.target(place); }, {});
    for (const auto& [name, bytes] : loaded.memory) {
      const bool of_expert = name.find(".experts.") != std::string::npos && !name.ends_with("router");
      EXPECT_EQ(all.contains(name), rank == 1 && !of_expert) << name;
      if (rank == 1 && !of_expert) others += std::ssize(bytes);
      all[name] = bytes;
    }
  }
  EXPECT_EQ(read, whole.frozen_elements * 4 + others);
  Loaded together;
  together.memory = std::move(all);
  expect_tiny_values(together, spec);
  std::vector<TensorInfo> tensors = test::tiny_tensors(spec, DType::kF32);
  std::erase_if(tensors,
                [](const TensorInfo& t) { return t.name == "model.layers.1.mlp.experts.3.up_proj.weight"; });
  test::write_tensors(directory / "model.safetensors", tensors);
  const std::string text = refusal([&] {
    Loaded loaded;
    load_model(ModelFiles(directory.path()), spec, layout_of(0),
               [&](size_t, const TensorPlace& place) { return loaded.target(place); }, {});
  });
  EXPECT_TRUE(contains(text, "missing: model.layers.1.mlp.experts.3.up_proj.weight")) << text;
}

TEST(Loader, MissingExtraAndMisshapenTensorsAreListed) {
  const TemporaryDirectory directory;
  const ModelSpec spec = test::write_tiny_model(directory.path(), test::tiny_config(), DType::kF32);
  const std::vector<TensorInfo> good = test::tiny_tensors(spec, DType::kF32);
  auto message = [&](const std::vector<TensorInfo>& tensors) {
    test::write_tensors(directory / "model.safetensors", tensors);
    return refusal([&] { load(directory.path(), spec, DType::kF32); });
  };
  std::vector<TensorInfo> tensors = good;
  std::erase_if(tensors, [](const TensorInfo& t) { return t.name == "model.layers.1.mlp.up_proj.weight"; });
  std::string text = message(tensors);
  EXPECT_TRUE(contains(text, "missing: model.layers.1.mlp.up_proj.weight")) << text;
  EXPECT_TRUE(contains(text, directory.path())) << text;
  tensors = good;
  tensors.push_back({"model.layers.2.mlp.up_proj.weight", DType::kF32, {20, 12}});
  text = message(tensors);
  EXPECT_TRUE(contains(text, "unexpected: model.layers.2.mlp.up_proj.weight [20, 12]")) << text;
  tensors = good;
  tensors[0].shape = {34, 12};
  text = message(tensors);
  EXPECT_TRUE(contains(text, "model.embed_tokens.weight is [34, 12], the model needs [33, 12]")) << text;
  tensors = good;
  tensors[0].shape = {12, 33};  // as many elements, another matrix
  EXPECT_TRUE(contains(message(tensors), "[12, 33]"));
  tensors = good;
  tensors[0].dtype = DType::kI32;
  EXPECT_TRUE(contains(message(tensors), "model.embed_tokens.weight is I32"));
  text = message({});
  EXPECT_TRUE(contains(text, "21 tensors differ") && contains(text, "and 1 more")) << text;
  EXPECT_NE(text.find("missing: model.embed_tokens"), std::string::npos);
}

TEST(Loader, OldBuffersAndAStoredTiedHeadAreNoDifference) {
  const TemporaryDirectory directory;
  const ModelSpec spec =
      test::write_tiny_model(directory.path(), test::tiny_config("llama", true), DType::kF32);
  std::vector<TensorInfo> tensors = test::tiny_tensors(spec, DType::kF32);
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", DType::kF32, {3}});
  test::write_tensors(directory / "model.safetensors", tensors);
  expect_tiny_values(load(directory.path(), spec, DType::kF32), spec);
  // The same matrix under both names; then another one.
  for (const bool same : {true, false}) {
    std::vector<TensorInfo> both = tensors;
    both.push_back({"lm_head.weight", DType::kF32, {33, 12}});
    SafetensorsWriter writer(directory / "model.safetensors", both);
    for (TensorInfo tensor : writer.order()) {
      const std::string name = tensor.name;
      if (same && name == "lm_head.weight") tensor.name = "model.embed_tokens.weight";
      writer.write(name, test::tiny_bytes(tensor));
    }
    writer.commit();
    if (same) {
      expect_tiny_values(load(directory.path(), spec, DType::kF32), spec);
    } else {
      EXPECT_TRUE(
          contains(refusal([&] { load(directory.path(), spec, DType::kF32); }), "tie_word_embeddings"));
    }
  }
}

// As a matrix that comes in segments is read and written: some rows in a pass, across the parts of a tensor.
TEST(Loader, ReadsAndExportsSomeRowsAtATime) {
  const TemporaryDirectory directory;
  const ModelSpec spec = test::write_tiny_model(directory / "base", test::tiny_config("qwen3"), DType::kF32);
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const Loaded whole = load(directory / "base", spec, DType::kF32);
  Loaded loaded = whole;
  for (auto& [name, bytes] : loaded.memory) bytes.assign(bytes.size(), std::byte{0x5A});
  constexpr int64_t kRows = 5;
  int64_t most = 0;
  for (int64_t first = 0; first == 0 || first < most; first += kRows) {
    const auto target = [&](size_t, const TensorPlace& place) -> LoadTarget {
      const Parameter& p = place.parameter;
      most = std::max(most, p.rows);
      if (first >= p.rows) return {};
      std::byte* const bytes = loaded.memory.at(p.name).data() + first * p.columns * 4;
      return {bytes, DType::kF32, first, std::min(kRows, p.rows - first)};
    };
    load_model(ModelFiles(directory / "base"), spec, layout, target, {.threads = 2});
  }
  EXPECT_TRUE(loaded.memory == whole.memory);
  std::vector<std::byte> view;  // only what was asked for stays
  const auto source = [&](size_t, const TensorPlace& place, int64_t row) {
    const Parameter& p = place.parameter;
    const int64_t first = row / kRows * kRows, rows = std::min(kRows, p.rows - first);
    const std::byte* const bytes = loaded.memory.at(p.name).data() + first * p.columns * 4;
    view.assign(bytes, bytes + rows * p.columns * 4);
    return WeightView{view.data(), DType::kF32, first, rows};
  };
  export_model(directory / "out", directory / "base", layout, source,
               {.dtype = DType::kF32, .part_bytes = kPartBytes, .replace = false});
  EXPECT_EQ(test::read_text(directory / "out/model.safetensors"),
            test::read_text(directory / "base/model.safetensors"));
}

TEST(Export, ALoadedModelIsWrittenByteForByteInOneFileOrInParts) {
  const TemporaryDirectory directory;
  const ModelSpec spec = test::write_tiny_model(directory / "base", test::tiny_config("qwen3"), DType::kF32);
  test::write_text(directory / "base/tokenizer.json", "{\"tok\": 1}");
  fs::create_directory(directory / "base/additional_chat_templates");
  test::write_text(directory / "base/additional_chat_templates/rag.jinja", "{{ x }}");
  test::write_text(directory / "base/notes.txt", "not ours to copy");
  const Loaded loaded = load(directory / "base", spec, DType::kF32);
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const auto source = [&](size_t, const TensorPlace& place, int64_t) { return loaded.view(place); };
  export_model(directory / "out", directory / "base", layout, source,
               {.dtype = DType::kF32, .part_bytes = kPartBytes, .replace = false});
  EXPECT_EQ(test::read_text(directory / "out/model.safetensors"),
            test::read_text(directory / "base/model.safetensors"));
  EXPECT_EQ(test::read_text(directory / "out/config.json"), test::read_text(directory / "base/config.json"));
  EXPECT_EQ(test::read_text(directory / "out/tokenizer.json"), "{\"tok\": 1}");
  EXPECT_EQ(test::read_text(directory / "out/additional_chat_templates/rag.jinja"), "{{ x }}");
  EXPECT_FALSE(fs::exists(directory / "out/notes.txt"));
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 2);  // no temporary directory stays

  export_model(directory / "parts", directory / "base", layout, source,
               {.dtype = DType::kF32, .part_bytes = 3000, .replace = false});
  EXPECT_TRUE(fs::exists(directory / "parts/model.safetensors.index.json"));
  expect_tiny_values(load(directory / "parts", spec, DType::kF32), spec);
  const VerifyResult whole = verify_model(directory / "base"), parts = verify_model(directory / "parts");
  EXPECT_TRUE(whole.ok) << whole.problem;
  EXPECT_EQ(whole.weights_hash, parts.weights_hash);
  EXPECT_EQ(whole.weights_hash.size(), 32u);
  EXPECT_GT(parts.files.size(), 2u);

  export_model(directory / "bf16", directory / "base", layout, source,
               {.dtype = DType::kBF16, .part_bytes = kPartBytes, .replace = false});
  EXPECT_EQ(json::parse(test::read_text(directory / "bf16/config.json"))["torch_dtype"], "bfloat16");
  expect_tiny_values(load(directory / "bf16", spec, DType::kF32), spec);
  EXPECT_NE(verify_model(directory / "bf16").weights_hash, whole.weights_hash);
}

TEST(Export, AnExistingOutputIsKeptUnlessItIsToBeReplaced) {
  const TemporaryDirectory directory;
  const ModelSpec spec = test::write_tiny_model(directory / "base", test::tiny_config(), DType::kF32);
  const Loaded loaded = load(directory / "base", spec, DType::kF32);
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const auto source = [&](size_t, const TensorPlace& place, int64_t) { return loaded.view(place); };
  fs::create_directory(directory / "out");
  test::write_text(directory / "out/mine.txt", "mine");
  ExportOptions options{.dtype = DType::kF32, .part_bytes = kPartBytes, .replace = false};
  refusal([&] { export_model(directory / "out", directory / "base", layout, source, options); },
          Exit::kIncompatible);
  EXPECT_EQ(test::read_text(directory / "out/mine.txt"), "mine");
  options.replace = true;
  // A source that fails half way: what was there stays whole and nothing is left behind.
  int calls = 0;
  const auto broken = [&](size_t, const TensorPlace& place, int64_t) {
    if (++calls == 5) throw std::runtime_error("lost");
    return loaded.view(place);
  };
  EXPECT_THROW(export_model(directory / "out", directory / "base", layout, broken, options),
               std::runtime_error);
  EXPECT_EQ(test::read_text(directory / "out/mine.txt"), "mine");
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 2);
  export_model(directory / "out", directory / "base", layout, source, options);
  EXPECT_FALSE(fs::exists(directory / "out/mine.txt"));
  EXPECT_TRUE(verify_model(directory / "out").ok);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 2);
}

TEST(Export, TheDtypeKeyKeepsTheFormThatWasRead) {
  auto convert = [](const json& config, DType dtype) {
    return json::parse(config_for_dtype(config.dump(), dtype, "x"));
  };
  EXPECT_EQ(convert({{"torch_dtype", "float16"}}, DType::kBF16), json({{"torch_dtype", "bfloat16"}}));
  EXPECT_EQ(convert({{"dtype", "bfloat16"}}, DType::kF32), json({{"dtype", "float32"}}));
  EXPECT_EQ(convert({{"a", 1}}, DType::kF32)["torch_dtype"], "float32");
  EXPECT_EQ(convert({{"rope_parameters", {}}}, DType::kF32)["dtype"], "float32");
  const std::string odd_spacing = "{ \"dtype\" :\"float32\"}";
  EXPECT_EQ(config_for_dtype(odd_spacing, DType::kF32, "x"), odd_spacing);
}

TEST(Verify, OneFlippedBitChangesTheHashAndDamageIsReported) {
  const TemporaryDirectory directory;
  test::write_tiny_model(directory.path(), test::tiny_config(), DType::kF32);
  const VerifyResult before = verify_model(directory.path());
  ASSERT_TRUE(before.ok) << before.problem;
  EXPECT_EQ(before.tensors, 21);
  EXPECT_EQ(before.files, (std::vector<std::string>{"model.safetensors"}));
  std::string bytes = test::read_text(directory / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  test::write_text(directory / "model.safetensors", bytes);
  EXPECT_NE(verify_model(directory.path()).weights_hash, before.weights_hash);
  bytes.pop_back();
  test::write_text(directory / "model.safetensors", bytes);
  const VerifyResult after = verify_model(directory.path());
  EXPECT_FALSE(after.ok);
  EXPECT_TRUE(after.weights_hash.empty());
  EXPECT_TRUE(contains(after.problem, "beyond buffer")) << after.problem;
}

}  // namespace
}  // namespace lm
