// Typed access to one JSON object of a model's configuration: a missing key or null is the default, another
// type or a number out of range is Error(11) "MODEL-23" that names the key. Borrows the object; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/json.h"

namespace lm {

// A key of ours, which most families' files have, and what another family's files call it.
struct KeyAlias {
  const char* ours = "";
  const char* file = "";
};

class ConfigReader {
 public:
  // `prefix` ("rope_scaling.") stands before the keys in messages. A key with an alias is looked up, and
  // named in messages, by the file's word alone.
  ConfigReader(const Json& object, const std::string& place, const std::string& prefix,
               std::span<const KeyAlias> aliases = {})
      : object_(object), place_(place), prefix_(prefix), aliases_(aliases) {}

  const std::string& place() const { return place_; }
  // Null when the key is missing or its value is null.
  const Json* find(const char* key) const;
  bool is_null(const char* key) const;  // there, and null
  // Of the object under `key`, whose keys have no aliases; anything else there, or nothing, is refused.
  ConfigReader inside(const char* key) const;
  // The same of an object that stands for the one under `key`.
  ConfigReader inside(const char* key, const Json& object) const;

  std::optional<std::string> text(const char* key) const;
  bool boolean(const char* key, bool missing) const;
  double number(const char* key, double missing) const;  // finite
  double required_number(const char* key) const;
  double positive(const char* key, double missing) const;               // in [1e-6, 1e6]
  int64_t size(const char* key, int64_t missing, int64_t most) const;   // 1 .. most
  int64_t count(const char* key, int64_t missing, int64_t most) const;  // 0 .. most
  int64_t required_size(const char* key, int64_t most) const;

  [[noreturn]] void fail(const std::string& key, const std::string& what) const;

 private:
  std::string name(const std::string& key) const;  // in the file
  int64_t integer(const char* key, int64_t missing, int64_t least, int64_t most) const;

  const Json& object_;
  const std::string& place_;
  std::string prefix_;
  std::span<const KeyAlias> aliases_;
};

}  // namespace lm
