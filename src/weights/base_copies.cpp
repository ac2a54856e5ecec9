#include "weights/base_copies.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "spec/parameter.h"
#include "weights/convert.h"
#include "weights/read_part.h"

namespace lm {
namespace {

constexpr int64_t kElementsAtOnce = int64_t{1} << 20;
// What the base's matrix is called where PEFT has put a layer around it, or nothing; and of a module that is
// trained whole the trained matrix beside it.
constexpr const char* kEnds[] = {".token_adapter.base_layer.weight", ".base_layer.weight",
                                 ".original_module.weight", ".weight"};
constexpr const char* kTrained = ".modules_to_save.weight";
constexpr const char* kTokenRows = ".token_adapter.trainable_tokens_delta";

[[noreturn]] void fail(const ModelFiles& adapter, const std::string& what) {
  throw Error(Exit::kInput, {.area = "FILE-23",
                             .what = what,
                             .place = adapter.directory(),
                             .next = "use the base model that the adapter was trained on; a matrix that was "
                                     "trained is named by modules_to_save"});
}

// The tensor as a matrix; `name` is in the files.
Parameter matrix_of(const ModelFiles& files, const std::string& name) {
  const SafetensorsEntry& entry = *files.find(name)->entry;
  Parameter out{.name = name, .parts = {}};
  if (entry.shape.size() != 2 || !is_weight_type(entry.dtype)) return out;
  out.rows = entry.shape[0];
  out.columns = entry.shape[1];
  out.parts = {{name, 0, out.rows}};
  return out;
}

bool equal(const ModelFiles& a, const std::string& copy, const ModelFiles& b, const std::string& original) {
  const Parameter of_copy = matrix_of(a, copy), of_original = matrix_of(b, original);
  if (of_copy.parts.empty() || of_original.parts.empty()) return false;
  if (of_copy.rows != of_original.rows || of_copy.columns != of_original.columns) return false;
  const FilePart left = file_part(a, of_copy, of_copy.parts.front()),
                 right = file_part(b, of_original, of_original.parts.front());
  const DType type = left.entry->dtype;
  const auto size = static_cast<int64_t>(dtype_size(type));
  std::vector<std::byte> x(static_cast<size_t>(std::min(kElementsAtOnce, of_copy.elements()) * size)),
      y(x.size());
  for (int64_t first = 0; first < of_copy.elements(); first += kElementsAtOnce) {
    const int64_t n = std::min(kElementsAtOnce, of_copy.elements() - first);
    read_part(left, first, n, type, x.data());
    read_part(right, first, n, type, y.data());
    if (std::memcmp(x.data(), y.data(), static_cast<size_t>(n * size)) != 0) return false;
  }
  return true;
}

}  // namespace

std::vector<std::string> names_of_copies(const std::string& path) {
  std::vector<std::string> out;
  for (const char* const end : kEnds) out.push_back(std::string(kAdapterPrefix) + path + end);
  return out;
}

std::vector<BaseCopy> base_copies(const ModelFiles& adapter, const ModelSpec& base,
                                  const std::function<bool(const std::string& name)>& own) {
  const std::string prefix(kAdapterPrefix), embedding = base.names.embedding, head = base.names.head;
  const std::string trained = prefix + embedding + ".weight";
  std::vector<BaseCopy> out;
  const auto add = [&](const std::string& name, const std::string& of_adapter, const std::string& of_base) {
    if (adapter.find(name) && !own(name)) out.push_back({name, of_adapter, of_base + ".weight"});
  };
  // `whole`: the trained tensor of a module that is trained whole; "": it is not.
  const auto add_module = [&](const std::string& path, const std::string& whole, const std::string& of_base) {
    for (const std::string& name : names_of_copies(path))
      add(name, name == prefix + path + ".weight" ? whole : "", of_base);
    if (!whole.empty()) add(prefix + path + kTrained, whole, of_base);
  };
  add_module(embedding, own(trained) ? trained : "", embedding);
  if (base.scores()) return out;
  if (!base.tied) {
    const std::string of_head = prefix + head + ".weight";
    add_module(head, own(of_head) ? of_head : "", head);
    return out;
  }
  add_module(head, own(trained) ? trained : "", embedding);
  const std::string rows = prefix + embedding + kTokenRows;
  if (own(rows)) add(prefix + head + kTokenRows, rows, embedding);
  return out;
}

void require_equal(const ModelFiles& adapter, const std::vector<BaseCopy>& copies,
                   const std::string& directory) {
  std::unique_ptr<ModelFiles> base;
  for (const BaseCopy& copy : copies) {
    if (!copy.of_adapter.empty()) {
      if (equal(adapter, copy.name, adapter, copy.of_adapter)) continue;
      fail(adapter,
           copy.name + " and " + copy.of_adapter +
               " differ, and the model's head is tied to its embedding: PEFT has trained two matrices");
    }
    if (directory.empty()) continue;
    if (!base) base = std::make_unique<ModelFiles>(directory);
    if (base->find(copy.of_base) && equal(adapter, copy.name, *base, copy.of_base)) continue;
    fail(adapter, copy.name + " is not the base model's, and modules_to_save does not name it");
  }
}

}  // namespace lm
