// The twin's cards, as the environment describes them. Replaced by the launcher half.
#pragma once
#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>
namespace twin {
struct Card {
  std::string name;
  int64_t memory = 0;
  std::array<uint8_t, 16> uuid{};
};
inline std::vector<Card> cards() {
  Card card;
  card.name = "NVIDIA H100 80GB HBM3";
  card.memory = int64_t{80} << 30;
  if (const char* g = std::getenv("TWIN_GPUS")) {
    const std::string s = g;
    card.name = s.substr(0, s.find(':'));
    card.memory = static_cast<int64_t>(std::atof(s.c_str() + s.find(':') + 1) * (1LL << 30));
  }
  card.uuid.fill(0x11);
  return {card};
}
inline std::vector<int> cuda_order() {
  return {0};
}
}  // namespace twin
