#include "checkpoint/manifest.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <set>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "config/config_text.h"
#include "weights/safetensors_header.h"

namespace lm {
namespace {

constexpr std::string_view kFormat = "lmlaunch checkpoint";
constexpr std::string_view kSeal = ",\n\"checksum\": \"";  // the text's last key, and 32 digits
constexpr std::string_view kEnd = "\"\n}\n";

[[noreturn]] void fail_integrity(const std::string& what, const std::string& place) {
  throw Error(Exit::kIntegrity, {.area = "INT-07",
                                 .what = what,
                                 .place = place,
                                 .next = "use another checkpoint of the run",
                                 .kept = "the other checkpoints"});
}

uint64_t parse_checksum(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size() || text.size() != 16)
    throw std::runtime_error("\"" + text.substr(0, 40) + "\" is no checksum");
  return value;
}

// Rejects fractions and numbers above 63 bits, whose conversion would change them.
int64_t count(const Json& json) {
  const int64_t value = json_integer(json);
  if (value < 0) throw std::runtime_error("a negative count");
  return value;
}

bool plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
}

Json file_json(const CheckpointFile& file) {
  Json chunks = Json::array();
  for (const FileChunk& chunk : file.chunks) chunks.push_back({chunk.bytes, checksum_text(chunk.checksum)});
  return {{"name", file.name}, {"bytes", file.bytes}, {"hash", file.hash()}, {"chunks", std::move(chunks)}};
}

CheckpointFile parse_file(const Json& json) {
  CheckpointFile file{.name = json.at("name"), .bytes = count(json.at("bytes")), .chunks = {}};
  if (!plain_name(file.name)) throw std::runtime_error("a file's name is not a plain name");
  int64_t offset = 0;
  for (const Json& chunk : json.at("chunks")) {
    const int64_t bytes = count(chunk.at(0));
    file.chunks.push_back({offset, bytes, parse_checksum(chunk.at(1))});
    const std::optional<int64_t> end = checked_add(offset, bytes);
    if (!end || *end > file.bytes || bytes == 0) throw std::runtime_error("chunks of " + file.name);
    offset = *end;
  }
  if (offset != file.bytes) throw std::runtime_error("chunks do not cover " + file.name);
  if (json.at("hash") != file.hash()) throw std::runtime_error("the hash of " + file.name);
  return file;
}

SavedArray parse_array(const Json& json, const std::vector<CheckpointFile>& files) {
  SavedArray array{.name = json.at("name"),
                   .first = count(json.at("first")),
                   .elements = count(json.at("elements")),
                   .file = static_cast<size_t>(count(json.at("file"))),
                   .offset = count(json.at("offset"))};
  if (!parse_safetensors_dtype(json.at("dtype").get<std::string>(), &array.dtype))
    throw std::runtime_error("the type of " + array.name);
  const auto bytes = checked_multiply(array.elements, static_cast<int64_t>(dtype_size(array.dtype)));
  const auto end = bytes ? checked_add(array.offset, *bytes) : std::nullopt;
  if (array.file >= files.size() || !end || *end > files[array.file].bytes)
    throw std::runtime_error("the place of " + array.name);
  return array;
}

Manifest manifest_of(const Json& json, const std::string& place) {
  if (json.at("format") != kFormat) throw std::runtime_error("it is not an lmlaunch checkpoint");
  if (const int64_t version = count(json.at("version")); version > kCheckpointVersion) {
    throw Error(Exit::kIncompatible,
                {.area = "CKPT-26",
                 .what = fmt::format("the checkpoint has format {}, this lmlaunch reads up to {}", version,
                                     kCheckpointVersion),
                 .place = place,
                 .next = "use the lmlaunch that wrote it, or a later one",
                 .kept = "the checkpoint"});
  }
  Manifest out;
  out.step = count(json.at("step"));
  std::optional<int64_t> bytes = 0;  // of all files
  for (const Json& file : json.at("files")) {
    out.files.push_back(parse_file(file));
    bytes = checked_add(*bytes, out.files.back().bytes);
    if (!bytes) throw std::runtime_error("files of more bytes than can be counted");
  }
  std::set<std::pair<std::string, int64_t>> names;
  for (const Json& array : json.at("arrays")) {
    out.arrays.push_back(parse_array(array, out.files));
    if (!names.emplace(out.arrays.back().name, out.arrays.back().first).second)
      throw std::runtime_error("an array twice: " + out.arrays.back().name);
  }
  for (const Json& tensor : json.at("tensors")) {
    out.tensors.push_back({.name = tensor.at("name"),
                           .block = count(tensor.at("block")),
                           .first = count(tensor.at("first")),
                           .shape = {}});
    for (const Json& size : tensor.at("shape")) out.tensors.back().shape.push_back(count(size));
  }
  for (const auto& [name, value] : json.at("numbers").items()) out.numbers[name] = json_integer(value);
  for (const auto& [key, part] : {std::pair("run", &out.run), std::pair("numerics", &out.numerics),
                                  std::pair("config", &out.config), std::pair("sources", &out.sources)}) {
    *part = json.at(key);
    if (!part->is_object()) throw std::runtime_error(std::string(key) + " is no object");
  }
  return out;
}

}  // namespace

std::string checksum_text(uint64_t checksum) {
  char text[17];
  std::snprintf(text, sizeof text, "%016lx", checksum);
  return text;
}

std::string hash_text(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return checksum_text(hash.high64) + checksum_text(hash.low64);
}

std::string CheckpointFile::hash() const {
  std::string text;
  for (const FileChunk& chunk : chunks) text += checksum_text(chunk.checksum);
  return hash_text(text);
}

int64_t Manifest::bytes() const {
  int64_t sum = 0;
  for (const CheckpointFile& file : files) sum += file.bytes;
  return sum;
}

std::vector<SavedTensor> trained_tensors(const ModelLayout& layout) {
  std::vector<SavedTensor> out;
  for (int64_t b = 0; b < std::ssize(layout.blocks); ++b) {
    for (const TensorPlace& place : layout.blocks[static_cast<size_t>(b)].tensors) {
      const Parameter& p = place.parameter;
      if (place.frozen) continue;
      for (const ParameterPart& part : p.parts) {
        // As it is exported, but for the matrices that the files hold transposed.
        out.push_back({part.name, b, place.offset + part.first * p.columns,
                       part.transposed ? std::vector{part.rows, p.columns} : p.shape(part)});
      }
    }
  }
  return out;
}

std::string manifest_text(const Manifest& manifest) {
  Json tensors = Json::array(), arrays = Json::array(), files = Json::array();
  for (const SavedTensor& t : manifest.tensors)
    tensors.push_back({{"name", t.name}, {"block", t.block}, {"first", t.first}, {"shape", t.shape}});
  for (const SavedArray& a : manifest.arrays)
    arrays.push_back({{"name", a.name},
                      {"dtype", safetensors_dtype(a.dtype)},
                      {"first", a.first},
                      {"elements", a.elements},
                      {"file", a.file},
                      {"offset", a.offset}});
  for (const CheckpointFile& file : manifest.files) files.push_back(file_json(file));
  // One key per line: readable, and chunks do not take a line each.
  std::string text = "{";
  const auto add = [&](const char* key, const Json& value) {
    text += (text.size() > 1 ? ",\n\"" : "\n\"") + std::string(key) +
            "\": " + value.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  add("format", kFormat), add("version", kCheckpointVersion), add("step", manifest.step);
  add("run", manifest.run), add("numerics", manifest.numerics), add("config", manifest.config);
  add("sources", manifest.sources), add("numbers", manifest.numbers), add("tensors", tensors);
  add("arrays", arrays), add("files", files);
  const std::string checksum = hash_text(text);
  return text + std::string(kSeal) + checksum + std::string(kEnd);
}

Manifest parse_manifest(std::string_view text, const std::string& place) {
  const size_t tail = kSeal.size() + 32 + kEnd.size();
  const std::string_view sealed = text.substr(0, text.size() < tail ? 0 : text.size() - tail);
  if (text.size() < tail ||
      text.substr(sealed.size()) != std::string(kSeal) + hash_text(sealed) + std::string(kEnd))
    fail_integrity("the manifest is corrupted: its checksum differs", place);
  try {
    return manifest_of(parse_json(text, place, {.bytes = kMostManifestBytes, .depth = 8}), place);
  } catch (const Json::exception& error) {
    throw Error(Exit::kInput, {.area = "CKPT-07",
                               .what = "the manifest: " + json_reason(error),
                               .place = place,
                               .next = "use another checkpoint"});
  } catch (const Error&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw Error(Exit::kInput, {.area = "CKPT-07",
                               .what = std::string("the manifest: ") + error.what(),
                               .place = place,
                               .next = "use another checkpoint"});
  }
}

Manifest read_manifest(const std::string& directory) {
  const std::string path = directory + "/" + kManifestName;
  Manifest manifest = parse_manifest(read_small_file(path, kMostManifestBytes), path);
  const std::optional<int64_t> named = checkpoint_step(std::filesystem::path(directory).filename().string());
  if (named && *named != manifest.step)
    fail_integrity(fmt::format("the manifest is of step {}", manifest.step), path);
  for (const CheckpointFile& file : manifest.files) {
    const File found(directory + "/" + file.name);
    if (found.size() != file.bytes)
      fail_integrity(fmt::format("the file has {} bytes, {} were written", found.size(), file.bytes),
                     found.path());
  }
  return manifest;
}

}  // namespace lm
