// The visitor on which counting, zeroing, saving, restoring and printing ride: whatever holds state that a
// resumed run needs lists each piece once, in a fixed order, in `visit_state(StateVisitor&)`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace lm {

class StateVisitor {
 public:
  virtual ~StateVisitor() = default;
  // `bytes` is the live memory, owned by the visited object: a visitor may read it or overwrite it. It is
  // valid during the call only. `shape` is what the name means to a reader; its product × the element size is
  // bytes.size().
  virtual void tensor(const std::string& name, DType type, const std::vector<int64_t>& shape,
                      std::span<std::byte> bytes) = 0;
  // Elements [first, first + bytes.size() / size of `type`) of a flat array of `elements`. A name's parts
  // come one after another and cover the array; how it is cut is no part of the state.
  virtual void part(const std::string& name, DType type, int64_t elements, int64_t first,
                    std::span<std::byte> bytes) = 0;
  // A named number (step, Adam's t, a data cursor): read or overwritten in place.
  virtual void number(const std::string& name, int64_t& value) = 0;
};

}  // namespace lm
