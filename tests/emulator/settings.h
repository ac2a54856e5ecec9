// What machine the emulator pretends to be, read from the environment: the one place that its libraries ask,
// so that the directory /dev, NVML and CUDA tell of the same cards.
//
//   EMULATOR_GPUS    "NAME:GIB,NAME:GIB:CAPABILITY,...", in PCI order; "" for none.
//                Default: "NVIDIA H100 80GB HBM3:80".
//                CAPABILITY: 7.5, 8.0, 8.6, 8.9, 9.0 (default) or 12.0
//   EMULATOR_LOST    a file with the places of cards, in PCI order, a line each.
//                These have fallen off the bus: NVML does not find them any more
//   EMULATOR_NVML    ok (default) | absent: nvmlInit fails | empty: no devices
//
// CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER mean what they mean to CUDA. Their rules are written here a
// second time, on purpose: the program under test has its own version, and neither may be measured by itself.
//
// Header-only, C++20, no CUDA, no LibTorch. Values of the first call; any thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

struct Card {
  std::string name;
  int64_t memory = 0;  // bytes
  int major = 9, minor = 0;
  // Bytes of a multiprocessor's shared memory, by CUDA's table of compute capabilities; a block may have 1
  // KiB less.
  int shared_memory() const {
    if (major < 8) return 64 << 10;
    if (major == 8 && minor == 0) return 164 << 10;
    return (major == 9 ? 228 : 100) << 10;
  }
  std::array<uint8_t, 16> uuid{};
  // "GPU-11111111-1111-1111-1111-111111111111"
  std::string uuid_text() const {
    static constexpr char kHex[] = "0123456789abcdef";
    std::string text = "GPU-";
    for (size_t i = 0; i < uuid.size(); ++i) {
      text += {kHex[uuid[i] / 16], kHex[uuid[i] % 16]};
      if (i == 3 || i == 5 || i == 7 || i == 9) text += '-';
    }
    return text;
  }
};

namespace detail {

inline std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

// The parts between commas; an empty text has none.
inline std::vector<std::string> parts(const std::string& text) {
  std::vector<std::string> out;
  for (size_t from = 0; from < text.size();) {
    const size_t comma = std::min(text.find(',', from), text.size());
    out.push_back(text.substr(from, comma - from));
    from = comma + 1;
  }
  return out;
}

inline std::vector<Card> read_cards() {
  std::vector<Card> out;
  for (const std::string& entry : parts(variable("EMULATOR_GPUS", "NVIDIA H100 80GB HBM3:80"))) {
    const size_t colon = entry.find(':'), second = std::min(entry.find(':', colon + 1), entry.size());
    const double gib = colon == std::string::npos ? 0 : std::atof(entry.c_str() + colon + 1);
    if (gib <= 0) throw std::invalid_argument("EMULATOR_GPUS: expected NAME:GIB, found <" + entry + ">");
    Card card;
    card.name = entry.substr(0, colon);
    card.memory = static_cast<int64_t>(gib * (1 << 30));
    if (second < entry.size()) {
      char* rest = nullptr;
      card.major = static_cast<int>(std::strtol(entry.c_str() + second + 1, &rest, 10));
      card.minor = *rest == '.' ? std::atoi(rest + 1) : 0;
    }
    card.uuid.fill(static_cast<uint8_t>(0x11 * (out.size() + 1)));
    out.push_back(card);
  }
  return out;
}

// The card (in PCI order) that one entry of CUDA_VISIBLE_DEVICES names, -1 for none.
inline int named(const std::string& entry, const std::vector<Card>& cards, const std::vector<int>& numbered) {
  if (entry.compare(0, 4, "GPU-") == 0) {
    int match = -1, matches = 0;
    for (int i = 0; i < static_cast<int>(cards.size()); ++i) {
      if (cards[static_cast<size_t>(i)].uuid_text().compare(0, entry.size(), entry) == 0)
        match = i, ++matches;
    }
    return matches == 1 ? match : -1;
  }
  char* end = nullptr;
  const long number = std::strtol(entry.c_str(), &end, 10);
  const bool valid = end != entry.c_str() && number >= 0 && number < static_cast<long>(numbered.size());
  return valid ? numbered[static_cast<size_t>(number)] : -1;
}

inline std::vector<int> read_cuda_order(const std::vector<Card>& cards) {
  std::vector<int> numbered;
  for (int i = 0; i < static_cast<int>(cards.size()); ++i) numbered.push_back(i);
  if (variable("CUDA_DEVICE_ORDER", "FASTEST_FIRST") != "PCI_BUS_ID") {
    std::stable_sort(numbered.begin(), numbered.end(), [&](int a, int b) {
      return cards[static_cast<size_t>(a)].memory > cards[static_cast<size_t>(b)].memory;
    });
  }
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (chosen == nullptr) return numbered;
  std::vector<int> visible;
  for (const std::string& entry : parts(chosen)) {
    const int card = named(entry, cards, numbered);
    if (card < 0) break;
    visible.push_back(card);
  }
  // A card that is named twice hides them all.
  return std::set<int>(visible.begin(), visible.end()).size() == visible.size() ? visible
                                                                                : std::vector<int>();
}

}  // namespace detail

// In PCI order; the byte 0x11 * (i + 1), sixteen times, is card i's UUID. Throws std::invalid_argument when
// EMULATOR_GPUS cannot be read.
inline const std::vector<Card>& cards() {
  static const std::vector<Card> all = detail::read_cards();
  return all;
}

// The devices that CUDA shows, as places in cards(): device 0 first. FASTEST_FIRST stands for more memory
// first.
inline const std::vector<int>& cuda_order() {
  static const std::vector<int> order = detail::read_cuda_order(cards());
  return order;
}

// Whether that card, in PCI order, has fallen off the bus by now.
inline bool lost(size_t place) {
  std::ifstream file(detail::variable("EMULATOR_LOST", ""));
  for (size_t one = 0; file >> one;)
    if (one == place) return true;
  return false;
}

inline std::string nvml_state() {
  return detail::variable("EMULATOR_NVML", "ok");
}

}  // namespace emulator
