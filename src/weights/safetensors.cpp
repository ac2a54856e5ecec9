#include "weights/safetensors.h"

#include <fmt/format.h>
#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "base/json.h"

namespace lm {
namespace {

[[noreturn]] void fail_file(const std::string& what, const std::string& place) {
  throw Error(Exit::kInput, {.area = "FILE-21",
                             .what = what,
                             .place = place,
                             .next = "the file is damaged, incomplete or no safetensors file: get it again"});
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  if (file_.size() < 8) fail_file(fmt::format("the file has {} bytes: no header", file_.size()), path);
  uint64_t length = 0;
  file_.read_at(0, std::as_writable_bytes(std::span(&length, 1)));  // little-endian, as this machine is
  if (length > static_cast<uint64_t>(kMostHeaderBytes)) {
    fail_file(fmt::format("the header length {} is more than {}", length, kMostHeaderBytes), path);
  }
  if (static_cast<int64_t>(length) > file_.size() - 8) {
    fail_file(fmt::format("the header length is {}, but the file has only {} bytes", length, file_.size()),
              path);
  }
  data_start_ = 8 + static_cast<int64_t>(length);
  std::string piece(std::min<size_t>(length, 64 << 10), '\0');
  int64_t at = 8;
  const auto next = [&]() -> std::string_view {
    const auto n = static_cast<size_t>(std::min(data_start_ - at, static_cast<int64_t>(piece.size())));
    file_.read_at(at, std::as_writable_bytes(std::span(piece).first(n)));
    at += static_cast<int64_t>(n);
    return {piece.data(), n};
  };
  header_ = parse_safetensors_header(next, file_.size() - data_start_, path);
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto& entries = header_.entries;
  const auto it =
      std::lower_bound(entries.begin(), entries.end(), name,
                       [](const SafetensorsEntry& entry, const std::string& n) { return entry.name < n; });
  return it != entries.end() && it->name == name ? &*it : nullptr;
}

void SafetensorsFile::read(const SafetensorsEntry& entry, int64_t offset, std::span<std::byte> bytes) const {
  LM_CHECK(offset >= 0 && offset + static_cast<int64_t>(bytes.size()) <= entry.bytes(),
           entry.name + " in " + path());
  const auto more = std::ranges::find(continued_, &entry, &Continued::entry);
  if (more == continued_.end()) return file_.read_at(data_start_ + entry.begin + offset, bytes);
  const auto own =
      static_cast<size_t>(std::clamp<int64_t>(more->split - offset, 0, static_cast<int64_t>(bytes.size())));
  if (own > 0) file_.read_at(data_start_ + entry.begin + offset, bytes.first(own));
  if (own == bytes.size()) return;
  more->file->read(*more->rest, std::max<int64_t>(offset - more->split, 0), bytes.subspan(own));
}

void SafetensorsFile::continue_tensor(const std::string& name, const SafetensorsFile& more, int64_t rows) {
  const auto mine = std::ranges::find(header_.entries, name, &SafetensorsEntry::name);
  const SafetensorsEntry* const rest = more.find(name);
  LM_CHECK(mine != header_.entries.end() && rest != nullptr, name);
  const bool matrices = mine->shape.size() == 2 && rest->shape.size() == 2;
  const bool fit = matrices && mine->dtype == rest->dtype && mine->shape[1] == rest->shape[1] &&
                   rest->shape[0] <= rows && rows - rest->shape[0] <= mine->shape[0] &&
                   rows >= mine->shape[0];
  if (!fit)
    throw Error(Exit::kInput,
                {.area = "FILE-22",
                 .what = fmt::format("\"{}\" {} does not continue the tensor of {}, {}, to {} rows",
                                     name.substr(0, 200), shape_text(rest->shape), path(),
                                     shape_text(mine->shape), rows),
                 .place = more.path(),
                 .next = "remove its directory from the cache, and start again"});
  const int64_t row = mine->shape[0] == 0 ? 0 : mine->bytes() / mine->shape[0];
  continued_.push_back({&*mine, (rows - rest->shape[0]) * row, &more, rest});
  mine->shape[0] = rows;
  mine->end = mine->begin + rows * row;
}

int64_t TensorInfo::bytes() const {
  std::optional<int64_t> n = static_cast<int64_t>(dtype_size(dtype));
  for (const int64_t size : shape) {
    n = checked_multiply(*n, size);
    LM_CHECK(n.has_value(), name + " " + shape_text(shape));
  }
  return *n;
}

std::string safetensors_beginning(std::span<const TensorInfo> tensors,
                                  const std::map<std::string, std::string>& metadata, int64_t alignment) {
  std::string out(sizeof(uint64_t), '\0');
  out += "{";
  if (!metadata.empty()) out += "\"__metadata__\":" + Json(metadata).dump();
  int64_t offset = 0;
  for (const TensorInfo& tensor : tensors) {
    const int64_t end = offset + tensor.bytes();
    if (out.back() != '{') out += ",";
    out +=
        fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", Json(tensor.name).dump(),
                    safetensors_dtype(tensor.dtype), Json(tensor.shape).dump(), offset, end);
    offset = end;
  }
  out += "}";
  out.resize(static_cast<size_t>(round_up(std::ssize(out), alignment)), ' ');
  const uint64_t length = out.size() - sizeof(uint64_t);
  LM_CHECK(static_cast<int64_t>(length) <= kMostHeaderBytes, fmt::format("a header of {} bytes", length));
  std::memcpy(out.data(), &length, sizeof length);
  return out;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : tensors_(std::move(tensors)), file_(path) {
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    const size_t size_a = dtype_size(a.dtype), size_b = dtype_size(b.dtype);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  for (size_t i = 1; i < tensors_.size(); ++i)
    LM_CHECK(tensors_[i - 1].name != tensors_[i].name, tensors_[i].name);
  file_.write(safetensors_beginning(tensors_, metadata));
  if (!tensors_.empty()) left_ = tensors_.front().bytes();
}

void SafetensorsWriter::write(const std::string& name, std::span<const std::byte> bytes) {
  while (left_ == 0 && current_ < tensors_.size() && tensors_[current_].name != name) {
    if (++current_ < tensors_.size()) left_ = tensors_[current_].bytes();
  }
  LM_CHECK(current_ < tensors_.size() && tensors_[current_].name == name, "out of order: " + name);
  LM_CHECK(static_cast<int64_t>(bytes.size()) <= left_, "too many bytes for " + name);
  file_.write(bytes);
  left_ -= static_cast<int64_t>(bytes.size());
}

void SafetensorsWriter::commit() {
  while (left_ == 0 && current_ < tensors_.size()) {
    if (++current_ < tensors_.size()) left_ = tensors_[current_].bytes();
  }
  LM_CHECK(current_ == tensors_.size(), "incomplete: " + tensors_[current_].name);
  file_.commit();
}

}  // namespace lm
