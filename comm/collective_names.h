// Names of the collectives of one kind, one for each unit or array. Ranks whose lists differ notice it at the
// first collective in which they are with different ones, before its bytes are used: those of another unit
// may be as many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lm {

class CollectiveNames {
 public:
  // "gather of unit", 2: "gather of unit 0", "gather of unit 1".
  CollectiveNames(const std::string& what, size_t count) {
    for (size_t i = 0; i < count; ++i) names_.push_back(what + ' ' + std::to_string(i));
  }
  // Valid as long as this is.
  const char* of(int64_t i) const { return names_.at(static_cast<size_t>(i)).c_str(); }

 private:
  std::vector<std::string> names_;
};

}  // namespace lm
