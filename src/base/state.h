// What a resumed run needs, listed: whatever holds such state names each piece once, in a fixed order. Small
// state in host memory (positions, counts) takes a StateVisitor, which may change it; weights and what
// belongs to them, wherever they live, are read by a StateSink, and reading leaves no trace.
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
  // A named number (step, Adam's t, a data cursor): read or overwritten in place.
  virtual void number(const std::string& name, int64_t& value) = 0;
};

class StateSink {
 public:
  virtual ~StateSink() = default;
  // Elements [first, first + bytes.size() / size of `type`) of what the name means, `shape` large. `bytes` is
  // host memory, valid during the call only. A name's parts come one after another and cover it; how it is
  // cut is no part of the state.
  virtual void part(const std::string& name, DType type, const std::vector<int64_t>& shape, int64_t first,
                    std::span<const std::byte> bytes) = 0;
  virtual void number(const std::string& name, int64_t value) = 0;
};

}  // namespace lm
