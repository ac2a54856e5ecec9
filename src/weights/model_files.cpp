#include "weights/model_files.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/json.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr int64_t kMostIndexBytes = int64_t{64} << 20;  // the largest models need 10 MB
constexpr int64_t kMostParts = 10'000;

[[noreturn]] void fail(const std::string& area, const std::string& what, const std::string& place,
                       const std::string& next) {
  throw Error(Exit::kInput, {.area = area, .what = what, .place = place, .next = next});
}

// Also true for a dangling link or a link loop: these must be refused with their reason, not ignored.
bool exists(const std::string& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() != fs::file_type::not_found;
}

bool plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

std::string short_text(const std::string& text) {
  return text.size() > 200 ? text.substr(0, 200) + "…" : text;
}

constexpr const char* kAgain = "the index is damaged or hostile: get the model again";

// Of an index: names of files by names of tensors.
Json read_weight_map(const std::string& path) {
  Json index = read_json_file(path, {.bytes = kMostIndexBytes, .depth = 8});
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object()) {
    fail("FILE-22", "\"weight_map\" must be an object of tensor names and file names", path, kAgain);
  }
  return std::move(*map);
}

}  // namespace

ModelFiles::ModelFiles(const std::string& directory, const std::string& single) : directory_(directory) {
  const std::string name = single.empty() ? kSingle : single;
  if (exists(directory + "/" + name)) {
    names_.push_back(name);
    files_.push_back(std::make_unique<SafetensorsFile>(directory + "/" + name));
  } else if (single.empty() && exists(directory + "/" + kIndex)) {
    names_.push_back(kIndex);
    read_index(directory + "/" + kIndex);
  } else {
    const bool pickled = single.empty() && (exists(directory + "/pytorch_model.bin") ||
                                            exists(directory + "/pytorch_model.bin.index.json"));
    fail("FILE-23",
         "there is no " + name + (single.empty() ? std::string(" and no ") + kIndex : "") +
             (pickled ? "; pickled weights (pytorch_model.bin) are not read: they can run code" : ""),
         directory, pickled ? "convert the model to safetensors" : "give the directory of a complete model");
  }
  if (single.empty() && exists(directory + "/" + kAddedRows)) read_added_rows(directory + "/" + kAddedRows);
  for (const auto& file : files_) {
    for (const SafetensorsEntry& entry : file->entries()) {
      CanonicalName name = canonical_name(entry.name);
      tensors_.push_back({&entry, file.get(), std::move(name.text), name.use});
    }
  }
  std::ranges::sort(tensors_, {}, &Tensor::name);
  for (size_t i = 1; i < tensors_.size(); ++i) {
    const Tensor &a = tensors_[i - 1], &b = tensors_[i];
    if (a.name != b.name) continue;
    const std::string &own = b.entry->name, &other = a.entry->name;
    const std::string what = own == other ? "\" is in two files"
                                          : "\" and \"" + short_text(other) + "\" are the same one, " +
                                                short_text(b.name) + ", in two layouts";
    fail("FILE-23", "tensor \"" + short_text(own) + what, b.file->path(),
         "the directory mixes two models: get it again");
  }
}

void ModelFiles::read_index(const std::string& path) {
  const Json map = read_weight_map(path);
  std::map<std::string, SafetensorsFile*> files;
  int64_t found = 0;
  for (const auto& [tensor, file] : map.items()) {
    if (!file.is_string() || !plain_name(file.get_ref<const std::string&>())) {
      const std::string text = file.is_string() ? file.get<std::string>() : file.dump();
      fail("FILE-22",
           "weight_map \"" + short_text(tensor) + "\": \"" + short_text(text) +
               "\" is not the plain name of a file in the model's directory",
           path, kAgain);
    }
    const std::string& name = file.get_ref<const std::string&>();
    SafetensorsFile*& opened = files[name];
    if (!opened) {
      if (static_cast<int64_t>(files.size()) > kMostParts)
        fail("FILE-22", "more than 10000 files", path, kAgain);
      try {
        files_.push_back(std::make_unique<SafetensorsFile>(directory_ + "/" + name));
      } catch (const Error& error) {
        ErrorText text = error.text();
        text.what = "weight_map \"" + short_text(tensor) + "\": " + text.what;
        throw Error(error.code(), text);
      }
      opened = files_.back().get();
      names_.push_back(name);
    }
    if (!opened->find(tensor)) {
      fail("FILE-22", "weight_map \"" + short_text(tensor) + "\": the file has no such tensor",
           opened->path(), kAgain);
    }
    ++found;
  }
  // Each tensor of the index is in its file, so equal counts mean that the files hold nothing else.
  for (const auto& file : files_) found -= static_cast<int64_t>(file->entries().size());
  if (found == 0) return;
  for (const auto& file : files_) {
    for (const SafetensorsEntry& entry : file->entries()) {
      const auto it = map.find(entry.name);
      if (it == map.end() || files[it->get<std::string>()] != file.get()) {
        fail("FILE-22", "tensor \"" + short_text(entry.name) + "\" is not in the index for this file",
             file->path(), kAgain);
      }
    }
  }
}

void ModelFiles::read_added_rows(const std::string& path) {
  added_ = std::make_unique<SafetensorsFile>(path);
  names_.push_back(kAddedRows);
  const auto rows = added_->metadata().find("rows");
  int64_t count = 0;
  if (rows != added_->metadata().end())
    std::from_chars(rows->second.data(), rows->second.data() + rows->second.size(), count);
  for (const SafetensorsEntry& entry : added_->entries()) {
    const auto file = std::ranges::find_if(files_, [&](const std::unique_ptr<SafetensorsFile>& one) {
      return one->find(entry.name) != nullptr;
    });
    if (file == files_.end())
      fail("FILE-22", "\"" + short_text(entry.name) + "\" is no tensor of the model", path,
           "remove its directory from the cache, and start again");
    (*file)->continue_tensor(entry.name, *added_, count);
  }
}

std::optional<ModelFiles::Tensor> ModelFiles::find(const std::string& name) const {
  const auto it = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const Tensor& t, const std::string& n) { return t.name < n; });
  if (it == tensors_.end() || it->name != name) return std::nullopt;
  return *it;
}

std::vector<std::string> tensor_names(const std::string& directory) {
  std::vector<std::string> out;
  const auto add = [&](const std::string& name) { out.push_back(canonical_name(name).text); };
  if (const std::string single = directory + "/" + kSingle; exists(single)) {
    const SafetensorsFile file(single);
    for (const SafetensorsEntry& entry : file.entries()) add(entry.name);
  } else if (const std::string index = directory + "/" + kIndex; exists(index)) {
    const Json map = read_weight_map(index);
    for (const auto& [tensor, file] : map.items()) add(tensor);
  }
  return out;
}

void write_model_files(const std::string& directory, const std::vector<TensorInfo>& tensors,
                       const std::function<void(const std::string&, const TensorSink&)>& fill,
                       int64_t part_bytes) {
  // Tensors stay in the given order (the model's), so that a part holds neighbouring layers.
  std::vector<std::vector<TensorInfo>> parts(1);
  int64_t total = 0, filled = 0;
  for (const TensorInfo& tensor : tensors) {
    const int64_t bytes = tensor.bytes();
    if (filled > 0 && filled + bytes > part_bytes) {
      parts.emplace_back();
      filled = 0;
    }
    parts.back().push_back(tensor);
    filled += bytes;
    total += bytes;
  }
  Json weight_map = Json::object();
  for (size_t p = 0; p < parts.size(); ++p) {
    char name[64] = "model.safetensors";
    if (parts.size() > 1)
      std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", p + 1, parts.size());
    SafetensorsWriter writer(directory + "/" + name, std::move(parts[p]));
    for (const TensorInfo& tensor : writer.order()) {
      weight_map[tensor.name] = name;
      fill(tensor.name, [&](std::span<const std::byte> bytes) { writer.write(tensor.name, bytes); });
    }
    writer.commit();
  }
  if (parts.size() == 1) return;
  const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  atomic_write_file(directory + "/" + kIndex, index.dump(2) + "\n");
}

}  // namespace lm
