// Models whose tensors are stored in several types, and what their files have that nobody trains.
#include "weights/file_types.h"

#include <map>

#include "export/export_model.h"
#include "tests/weights/support.h"
#include "weights/loader.h"
#include "weights/verify.h"

namespace lm {
namespace {

using test::TemporaryDirectory;

bool is_norm(const std::string& name) {
  return name.ends_with("norm.weight");
}

// Norms in fp32 and the head in fp16, among bf16.
DType type_of(const std::string& name) {
  return is_norm(name) ? DType::kF32 : name == "lm_head.weight" ? DType::kF16 : DType::kBF16;
}

std::vector<TensorInfo> mixed_tensors(const ModelSpec& spec) {
  std::vector<TensorInfo> out = test::tiny_tensors(spec, DType::kBF16);
  for (TensorInfo& info : out) info.dtype = type_of(info.name);
  return out;
}

ModelSpec write_mixed(const std::string& directory, const std::vector<TensorInfo>& more = {}) {
  const ModelSpec spec = test::write_tiny_model(directory, test::tiny_config(), DType::kBF16);
  std::vector<TensorInfo> infos = mixed_tensors(spec);
  infos.insert(infos.end(), more.begin(), more.end());
  test::write_tensors(directory + "/model.safetensors", infos);
  return spec;
}

using Memory = std::map<std::string, std::vector<std::byte>>;

// As fp32, so that the memory has what the files have.
Memory load(const std::string& directory, const ModelSpec& spec, const ModelLayout& layout) {
  Memory memory;
  const auto target = [&](size_t, const TensorPlace& place) {
    auto& bytes = memory[place.parameter.name];
    bytes.resize(static_cast<size_t>(place.parameter.elements()) * 4);
    return LoadTarget{bytes.data(), DType::kF32};
  };
  load_model(ModelFiles(directory), spec, layout, target, {.threads = 2});
  return memory;
}

WeightSource source_of(const Memory& memory) {
  return [&memory](size_t, const TensorPlace& place, int64_t) {
    return WeightView{memory.at(place.parameter.name).data(), DType::kF32};
  };
}

std::map<std::string, DType> types_in(const std::string& directory) {
  std::map<std::string, DType> out;
  const ModelFiles files(directory);
  for (const ModelFiles::Tensor& tensor : files.tensors()) out[tensor.entry->name] = tensor.entry->dtype;
  return out;
}

std::string weights_of(const TemporaryDirectory& directory, const std::string& name) {
  return test::read_text(directory / (name + "/model.safetensors"));
}

TEST(FileTypes, MostElementsDecideWhatIsCommon) {
  const TemporaryDirectory directory;
  const ModelSpec spec = write_mixed(directory / "base");
  const ModelFiles files(directory / "base");
  const FileTypes types = file_types(files, make_layout(spec, nullptr, DType::kBF16));
  EXPECT_EQ(types.common, DType::kBF16);
  EXPECT_EQ(types.others.size(), 6u);  // two norms of two layers, the last one, and the head
  for (const auto& [name, type] : types.others) EXPECT_EQ(type, type_of(name)) << name;
  // Eight tensors, which are larger, beside thirteen.
  std::vector<TensorInfo> few = mixed_tensors(spec);
  for (TensorInfo& info : few) {
    const bool large = info.name.find("self_attn") == std::string::npos && !is_norm(info.name);
    info.dtype = large ? DType::kBF16 : DType::kF32;
  }
  test::write_tensors(directory / "base/model.safetensors", few);
  const FileTypes large =
      file_types(ModelFiles(directory / "base"), make_layout(spec, nullptr, DType::kBF16));
  EXPECT_EQ(large.common, DType::kBF16);
  EXPECT_EQ(large.others.size(), 13u);
  // One type: nothing is special. None of the tensors: nothing is common.
  test::write_tiny_model(directory / "plain", test::tiny_config(), DType::kF32);
  const FileTypes plain =
      file_types(ModelFiles(directory / "plain"), make_layout(spec, nullptr, DType::kBF16));
  EXPECT_EQ(plain.common, DType::kF32);
  EXPECT_TRUE(plain.others.empty());
  test::write_tensors(directory / "plain/model.safetensors", {{"x", DType::kF32, {2}}});
  EXPECT_EQ(file_types(ModelFiles(directory / "plain"), make_layout(spec, nullptr, DType::kBF16)).common,
            std::nullopt);
}

TEST(FileTypes, AMixedModelComesBackByteForByte) {
  const TemporaryDirectory directory;
  const ModelSpec spec = write_mixed(directory / "base");
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const Memory memory = load(directory / "base", spec, layout);
  const ExportOptions options{.dtype = DType::kBF16, .replace = true};
  export_model(directory / "out", directory / "base", layout, source_of(memory), options);
  EXPECT_EQ(weights_of(directory, "out"), weights_of(directory, "base"));
  EXPECT_EQ(export_hash(directory / "base", layout, source_of(memory), options),
            verify_model(directory / "out").weights_hash);
  EXPECT_TRUE(takes_from_base(directory / "base", layout, options));
  test::write_tiny_model(directory / "plain", test::tiny_config(), DType::kF32);
  EXPECT_FALSE(takes_from_base(directory / "plain", layout, options));
}

// What is trained in fp32 has more bits than fp16 holds; what is frozen has not.
TEST(FileTypes, InFp32OnlyWhatIsFrozenKeepsANarrowerType) {
  const TemporaryDirectory directory;
  const ModelSpec spec = write_mixed(directory / "base");
  for (const bool frozen : {false, true}) {
    TrainedFilter trained;
    if (frozen) trained = [](const Parameter& parameter) { return parameter.name != "head"; };
    const ModelLayout layout = make_layout(spec, nullptr, DType::kF32, nullptr, trained);
    const Memory memory = load(directory / "base", spec, layout);
    export_model(directory / "out", directory / "base", layout, source_of(memory),
                 {.dtype = DType::kF32, .replace = true});
    for (const auto& [name, type] : types_in(directory / "out"))
      EXPECT_EQ(type, frozen && name == "lm_head.weight" ? DType::kF16 : DType::kF32) << name;
  }
}

// A bf16 run has rounded them: the files' bytes are written.
TEST(FileTypes, FrozenTensorsOfAnotherTypeAreTheFilesOwn) {
  const TemporaryDirectory directory;
  const ModelSpec spec = write_mixed(directory / "base");
  const TrainedFilter trained = [](const Parameter& parameter) {
    return parameter.kind != ParameterKind::kNorm;
  };
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16, nullptr, trained);
  Memory memory = load(directory / "base", spec, layout);
  for (auto& [name, bytes] : memory) {
    if (name.ends_with("norm")) bytes.assign(bytes.size(), std::byte{0x41});
  }
  export_model(directory / "out", directory / "base", layout, source_of(memory), {.dtype = DType::kBF16});
  EXPECT_EQ(weights_of(directory, "out"), weights_of(directory, "base"));
}

TEST(FileTypes, WhatNobodyTrainsPassesThrough) {
  const TemporaryDirectory directory;
  const std::string borrower = "model.layers.1.self_attn.spare_proj";
  const std::vector<TensorInfo> more = {
      {"model.layers.0.self_attn.rotary_emb.inv_freq", DType::kF32, {3}},
      {borrower + ".weight", DType::kBF16, {2, 12}},
  };
  const ModelSpec spec = write_mixed(directory / "base");
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const Memory memory = load(directory / "base", spec, layout);
  write_mixed(directory / "base", more);
  ExportOptions options{.dtype = DType::kBF16, .replace = true, .unread = {borrower}};
  export_model(directory / "out", directory / "base", layout, source_of(memory), options);
  EXPECT_EQ(weights_of(directory, "out"), weights_of(directory, "base"));
  EXPECT_EQ(exported_tensors(directory / "base", layout, options).size(), 21u + more.size());
  // Random weights have nothing of the files.
  options.fresh = true;
  export_model(directory / "out", directory / "base", layout, source_of(memory), options);
  EXPECT_EQ(types_in(directory / "out").size(), 21u);
  for (const auto& [name, type] : types_in(directory / "out")) EXPECT_EQ(type, DType::kBF16) << name;
}

// The trained weights are worth more than the types of the files that they began with.
TEST(FileTypes, ADamagedBaseKeepsNoModelFromBeingWritten) {
  const TemporaryDirectory directory;
  const ModelSpec spec = write_mixed(directory / "base");
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const Memory memory = load(directory / "base", spec, layout);
  test::write_text(directory / "base/model.safetensors", "damaged");
  export_model(directory / "out", directory / "base", layout, source_of(memory), {.dtype = DType::kBF16});
  Memory read = load(directory / "out", spec, layout), given = memory;
  for (Memory* one : {&read, &given}) one->erase("head");  // fp16 has bits that bf16 has not
  EXPECT_TRUE(read == given);
  for (const auto& [name, type] : types_in(directory / "out")) EXPECT_EQ(type, DType::kBF16) << name;
}

TEST(FileTypes, OnlyTensorsThatLoseBitsAreNamed) {
  const TemporaryDirectory directory;
  constexpr int64_t kMany = (int64_t{1} << 20) + 3;  // the last ones are read by themselves
  SafetensorsWriter writer(
      directory / "model.safetensors",
      {{"exact", DType::kF32, {2}}, {"fine", DType::kF32, {kMany}}, {"half", DType::kF16, {2}}});
  const auto write = [&](const char* name, const auto& values) {
    writer.write(name, std::as_bytes(std::span(values)));
  };
  std::vector<float> fine(static_cast<size_t>(kMany), 1.5F);
  fine.back() = 1.0009765625F;  // 1 + 2^-10: an fp16, no bf16
  write("exact", std::vector<float>{-0.5F, 1024.F});
  write("fine", fine);
  write("half", std::vector<uint16_t>{0x3C00, 0x3C01});
  writer.commit();
  const ModelFiles files(directory.path());
  const TensorTypes all = {
      {"exact", DType::kF32}, {"fine", DType::kF32}, {"half", DType::kF16}, {"absent", DType::kF32}};
  using Names = std::vector<std::string>;
  EXPECT_EQ(rounded_tensors(files, all, DType::kBF16), (Names{"fine", "half"}));
  EXPECT_EQ(rounded_tensors(files, all, DType::kF16), Names());
  EXPECT_EQ(rounded_tensors(files, all, DType::kF32), Names());
}

}  // namespace
}  // namespace lm
