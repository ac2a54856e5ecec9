#include "weights/model_files.h"

#include <sys/stat.h>

#include "tests/weights/support.h"

namespace lm {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::contains;
using test::refusal;
using test::TemporaryDirectory;

const std::vector<TensorInfo> kTwo = {{"a", DType::kF32, {2}}, {"b", DType::kF32, {3}}};

void write_index(const std::string& directory, const json& weight_map) {
  test::write_text(directory + "/model.safetensors.index.json", json{{"weight_map", weight_map}}.dump());
}

// Opening must end in an Error(11), whatever stands there: who opens a FIFO, or reads a device, never
// returns.
std::string refused(const std::string& directory) {
  return refusal([&] { ModelFiles files(directory); });
}

TEST(ModelFiles, AMissingModelIsNamedAndPickledWeightsAreNotRead) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(contains(refused(directory.path()), "no model.safetensors"));
  test::write_text(directory / "pytorch_model.bin", "x");
  EXPECT_TRUE(contains(refused(directory.path()), "pickled"));
}

TEST(ModelDirectory, AMissingOneIsNamed) {
  EXPECT_TRUE(
      contains(refusal([] { read_model_spec("/nonexistent/model"); }), "/nonexistent/model/config.json"));
}

// As the program calls them, without the parts.
TEST(ModelDirectory, TheNamesOfAnIndexNeedNoParts) {
  const TemporaryDirectory directory;
  EXPECT_TRUE(tensor_names(directory.path()).empty());
  write_index(directory.path(), {{"language_model.model.norm.weight", "model-00001-of-00002.safetensors"},
                                 {"lm_head.weight", "model-00002-of-00002.safetensors"}});
  EXPECT_EQ(tensor_names(directory.path()),
            (std::vector<std::string>{"model.norm.weight", "lm_head.weight"}));
  test::write_text(directory / "model.safetensors.index.json", "{}");
  EXPECT_TRUE(contains(refusal([&] { tensor_names(directory.path()); }), "weight_map"));
}

TEST(ModelFiles, SpecialFilesAreRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory / "model.safetensors";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_TRUE(contains(refused(directory.path()), "a FIFO"));
  fs::remove(path);
  fs::create_directory(path);
  EXPECT_TRUE(contains(refused(directory.path()), "a directory"));
  fs::remove(path);
  fs::create_symlink("/dev/zero", path);
  EXPECT_TRUE(contains(refused(directory.path()), "a device"));
  fs::remove(path);
  fs::create_symlink("model.safetensors", path);
  EXPECT_TRUE(contains(refused(directory.path()), "cannot open"));
  fs::remove(path);
  fs::create_symlink("nowhere", path);
  EXPECT_TRUE(contains(refused(directory.path()), "cannot open"));
}

TEST(ModelFiles, ThePartsOfAnIndexAreOneModel) {
  const TemporaryDirectory directory;
  test::write_tensors(directory / "one.safetensors", {kTwo[0]});
  test::write_tensors(directory / "two.safetensors", {kTwo[1], {"c", DType::kF32, {1}}});
  write_index(directory.path(),
              {{"a", "one.safetensors"}, {"b", "two.safetensors"}, {"c", "two.safetensors"}});
  const ModelFiles files(directory.path());
  ASSERT_EQ(files.tensors().size(), 3u);
  EXPECT_EQ(files.tensors()[1].entry->name, "b");
  EXPECT_EQ(files.find("b")->file->path(), directory / "two.safetensors");
  EXPECT_FALSE(files.find("d").has_value());
  EXPECT_EQ(files.names(),
            (std::vector<std::string>{"model.safetensors.index.json", "one.safetensors", "two.safetensors"}));
}

TEST(ModelFiles, ANameInAnIndexIsNeverAPath) {
  const TemporaryDirectory outer;
  fs::create_directory(outer / "model");
  test::write_tensors(outer / "outside.safetensors", kTwo);
  test::write_tensors(outer / "model/x.safetensors", kTwo);
  const std::string absolute = outer / "outside.safetensors";
  const std::vector<json> names = {"../outside.safetensors",
                                   absolute,
                                   "./x.safetensors",
                                   "x.safetensors/",
                                   "..",
                                   ".",
                                   "",
                                   "a/b",
                                   std::string("x.safetensors\0.y", 16),
                                   std::string(256, 'x'),
                                   7,
                                   nullptr,
                                   json::array({"x.safetensors"})};
  for (const json& name : names) {
    write_index(outer / "model", {{"a", name}, {"b", "x.safetensors"}});
    const std::string message = refused(outer / "model");
    EXPECT_TRUE(contains(message, "weight_map \"a\"") && contains(message, "plain name")) << message;
  }
  // Not decoded, so just the name of a file that is not there.
  for (const char* name :
       {"%2e%2e%2foutside.safetensors", "..%2foutside.safetensors", "..\\outside.safetensors"}) {
    write_index(outer / "model", {{"a", name}, {"b", name}});
    EXPECT_TRUE(contains(refused(outer / "model"), "cannot open")) << name;
  }
}

TEST(ModelFiles, SpecialFilesBehindAnIndexAreRefusedWithTheirKey) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::mkfifo((directory / "fifo").c_str(), 0600), 0);
  fs::create_directory(directory / "folder");
  fs::create_symlink("/dev/zero", directory / "zero");
  fs::create_symlink("loop", directory / "loop");
  fs::create_symlink("nowhere", directory / "dangling");
  for (const char* name : {"fifo", "folder", "zero", "loop", "dangling", "absent"}) {
    write_index(directory.path(), {{"some.weight", name}});
    EXPECT_TRUE(contains(refused(directory.path()), "weight_map \"some.weight\"")) << name;
  }
}

TEST(ModelFiles, AnIndexAndItsFilesMustAgree) {
  const TemporaryDirectory directory;
  test::write_tensors(directory / "one.safetensors", kTwo);
  test::write_tensors(directory / "two.safetensors", kTwo);
  write_index(directory.path(), {{"a", "one.safetensors"}, {"x", "one.safetensors"}});
  EXPECT_TRUE(contains(refused(directory.path()), "\"x\""));
  write_index(directory.path(), {{"a", "one.safetensors"}});
  EXPECT_TRUE(contains(refused(directory.path()), "\"b\" is not in the index"));
  write_index(directory.path(), {{"a", "one.safetensors"}, {"b", "two.safetensors"}});
  EXPECT_TRUE(contains(refused(directory.path()), "not in the index"));
}

TEST(ModelFiles, ADamagedIndexIsRefused) {
  const TemporaryDirectory directory;
  const std::string path = directory / "model.safetensors.index.json";
  test::write_tensors(directory / "one.safetensors", kTwo);
  for (const std::string& text : std::vector<std::string>{
           "", "{", "[]", "7", "{}", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":\"one.safetensors\"",
           "{\"weight_map\":{\"a\":\"one.safetensors\",\"a\":\"one.safetensors\"}}",
           "{\"weight_map\":" + std::string(100000, '[') + "}", std::string("{\"weight_map\":{}}\0{", 19)}) {
    test::write_text(path, text);
    EXPECT_TRUE(contains(refused(directory.path()), "index.json")) << text.substr(0, 50);
  }
}

TEST(ModelFiles, TheHubCacheLayoutLoadsThroughItsLinks) {
  const TemporaryDirectory cache;
  const std::string folder = cache / "models--some--model";
  fs::create_directories(folder + "/blobs");
  fs::create_directories(folder + "/snapshots/0123abc");
  test::write_tensors(folder + "/blobs/9f86d0", kTwo);
  fs::create_symlink("../../blobs/9f86d0", folder + "/snapshots/0123abc/model.safetensors");
  EXPECT_EQ(ModelFiles(folder + "/snapshots/0123abc").tensors().size(), 2u);
}

TEST(ModelFiles, ALargeModelIsWrittenInPartsWithAnIndex) {
  const TemporaryDirectory directory;
  const std::vector<TensorInfo> tensors = {
      {"c", DType::kF32, {10}}, {"a", DType::kF32, {10}}, {"b", DType::kF32, {30}}, {"d", DType::kF32, {1}}};
  std::vector<std::string> asked;
  auto fill = [&](const std::string& name, const TensorSink& sink) {
    asked.push_back(name);
    for (const TensorInfo& tensor : tensors) {
      if (tensor.name == name) sink(test::tiny_bytes(tensor));
    }
  };
  write_model_files(directory.path(), tensors, fill, 80);
  EXPECT_EQ(asked, (std::vector<std::string>{"a", "c", "b", "d"}));
  EXPECT_TRUE(fs::exists(directory / "model-00001-of-00003.safetensors"));
  const json index = json::parse(test::read_text(directory / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 204);
  EXPECT_EQ(index["weight_map"]["b"], "model-00002-of-00003.safetensors");
  const ModelFiles files(directory.path());
  ASSERT_EQ(files.tensors().size(), 4u);
  for (const TensorInfo& tensor : tensors) {
    std::vector<std::byte> bytes(static_cast<size_t>(tensor.bytes()));
    const ModelFiles::Tensor found = *files.find(tensor.name);
    found.file->read(*found.entry, 0, bytes);
    EXPECT_EQ(bytes, test::tiny_bytes(tensor));
  }
}

}  // namespace
}  // namespace lm
