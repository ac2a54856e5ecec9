#include "launcher/machine/rate_cache.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>

#include "base/file.h"

namespace lm {
namespace {

constexpr int64_t kHour = 3600, kWeek = 7 * 24 * kHour;  // seconds

std::string text_of(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

// The file's name is the FNV-1a hash of the whole key.
std::string file_of(const std::string& cache_dir, const std::string& folder, const Json& key) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text_of(key)) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char name[32];
  std::snprintf(name, sizeof name, "%016lx.json", static_cast<unsigned long>(hash));
  return cache_dir + "/" + folder + "/" + name;
}

}  // namespace

bool read_figures(const std::string& cache_dir, const std::string& folder, const Json& key,
                  const std::function<void(const Json&)>& read) {
  const std::string file = file_of(cache_dir, folder, key);
  if (cache_dir.empty() || access(file.c_str(), R_OK) != 0) return false;
  try {
    const Json json = read_json_file(file, {.bytes = 4096, .depth = 4});
    for (const auto& [name, value] : key.items()) {
      if (json.at(name) != value) return false;
    }
    const int64_t age = std::time(nullptr) - json.at("measured").get<int64_t>();
    if (age < 0 || age >= kWeek) return false;
    read(json);
    return true;
  } catch (const std::exception&) {
    return false;  // damaged
  }
}

std::string cache_figures(const std::string& cache_dir, const std::string& folder, const Json& key,
                          const Json& figures, bool certain) {
  if (cache_dir.empty()) return "";
  try {
    const std::string file = file_of(cache_dir, folder, key);
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    Json json = key;
    json.update(figures);
    json["measured"] = static_cast<int64_t>(std::time(nullptr)) - (certain ? 0 : kWeek - kHour);
    atomic_write_file(file, text_of(json, 2) + "\n");
    return file;
  } catch (const std::exception&) {
    return "";
  }
}

double cached_rate(const Json& figures, const char* name) {
  const auto rate = figures.at(name).get<double>();
  if (!std::isfinite(rate) || rate <= 0) throw std::range_error(name);
  return rate;
}

}  // namespace lm
