// State for tests of checkpoints that need no model: a small catalogue, whose bytes follow from a seed that
// the manifest holds, so that a checkpoint whose checksums fit, but whose bytes are another save's, is seen.
#pragma once

#include <string>

#include "base/error.h"
#include "checkpoint/restore.h"
#include "plan/state_catalogue.h"

namespace lm::synthetic_state {

// About 1.3 MiB: an array of more than one request, and two small ones.
inline StateCatalogue small_catalogue() {
  const auto array = [](const char* name, int64_t elements, int64_t unit) {
    return StateEntry{.name = name, .shape = {elements}, .unit = unit, .elements = elements};
  };
  return {array("block0.weight", 81 * 4096, 0), array("block1.weight", 4096, 1),
          array("block1.exp_avg", 4096, 1), StateEntry{.name = "optimizer.t"}};
}

inline std::vector<std::byte> bytes_of(const StateEntry& entry, int64_t seed) {
  std::vector<std::byte> out(static_cast<size_t>(entry.bytes()));
  uint64_t x = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15u + std::hash<std::string>()(entry.name);
  for (std::byte& byte : out) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    byte = static_cast<std::byte>(x >> 32);
  }
  return out;
}

inline void write_state(const StateCatalogue& catalogue, int64_t seed, StateSink& sink) {
  for (const StateEntry& entry : catalogue) {
    const auto number = std::as_bytes(std::span(&seed, 1));
    const std::vector<std::byte> bytes =
        entry.unit < 0 ? std::vector(number.begin(), number.end()) : bytes_of(entry, seed);
    sink.write(entry, 0, bytes);
  }
}

inline Manifest manifest_of(int64_t step, int64_t seed) {
  Manifest out;
  out.step = step;
  out.run = {{"seed", seed}};
  return out;
}

// The seed of a checkpoint whose every byte is as it was saved. Throws Error.
inline int64_t verified_seed(const std::string& checkpoint) {
  CheckpointReader reader(checkpoint);
  reader.verify();
  const auto seed = reader.manifest().run.at("seed").get<int64_t>();
  LM_CHECK(reader.manifest().numbers.at("optimizer.t") == seed, "a number of another save");
  for (const StateEntry& entry : small_catalogue()) {
    if (entry.unit < 0) continue;
    std::vector<std::byte> bytes(static_cast<size_t>(entry.bytes()));
    reader.read(entry.name, 0, bytes);
    LM_CHECK(bytes == bytes_of(entry, seed), "bytes of another save");
  }
  return seed;
}

}  // namespace lm::synthetic_state
