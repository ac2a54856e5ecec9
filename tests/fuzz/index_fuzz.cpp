// Any bytes as a model directory's files: refused with Error(11), or every tensor can be found and no file
// lies outside of the directory. The first byte says what the rest is: '0' an index over the parts one, two
// and four, '1' the only file of a model, '2' the only file of an adapter; else the directory has no model.
#include "tests/fuzz/support.h"
#include "weights/model_files.h"

namespace {

using lm::fuzz::Directory;
using lm::fuzz::MemoryFile;
using lm::fuzz::require;

struct Model {
  Model() {
    one.set_safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
    two.set_safetensors(
        R"({"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"c":{"dtype":"U8","shape":[],"data_offsets":[3,4]}})",
        4);
    four.set_safetensors(
        R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
        0);
    indexed.link("model.safetensors.index.json", text);
    indexed.link("one", one);
    indexed.link("two", two);
    indexed.link("four", four);
    indexed.link("text", text);
    std::filesystem::create_directory(indexed.path() + "/folder");
    single.link("model.safetensors", text);
    adapter.link("adapter_model.safetensors", text);
    pickled.link("pytorch_model.bin", text);
  }
  MemoryFile text, one, two, four;
  Directory indexed, single, adapter, pickled, empty;
};

void check(const lm::ModelFiles& files) {
  for (const std::string& name : files.names()) {
    require(!name.empty() && name != "." && name != ".." && name.find('/') == name.npos &&
            name.size() <= 255);
  }
  for (size_t i = 0; i < files.tensors().size(); ++i) {
    const lm::ModelFiles::Tensor& tensor = files.tensors()[i];
    require(i == 0 || files.tensors()[i - 1].name < tensor.name);
    const auto found = files.find(tensor.name);
    require(found && found->entry == tensor.entry && found->file == tensor.file);
    require(tensor.file->path().starts_with(files.directory() + "/"));
  }
  require(!files.find("\xFF"));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Model model;
  if (size == 0) return 0;
  const std::string_view text = lm::fuzz::text_of(data + 1, size - 1);
  if (data[0] == '0') {
    model.text.set({text});
  } else {
    model.text.set_safetensors(text, 8);
  }
  const auto files = lm::fuzz::parse(lm::Exit::kInput, [&] {
    if (data[0] == '0') return lm::ModelFiles(model.indexed.path());
    if (data[0] == '1') return lm::ModelFiles(model.single.path());
    if (data[0] == '2') return lm::ModelFiles(model.adapter.path(), "adapter_model.safetensors");
    return lm::ModelFiles(data[0] == '3' ? model.pickled.path() : model.empty.path());
  });
  if (files) check(*files);
  return 0;
}
