#include "launcher/machine/visible_gpus.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <sstream>

#include "plan/machine.h"

namespace lm {
namespace {

// The cards' indices in CUDA's order.
std::vector<int> numbering(const std::vector<GpuFacts>& cards, bool by_pci) {
  std::vector<int> places(cards.size());
  std::iota(places.begin(), places.end(), 0);
  if (by_pci) return places;
  const auto peak = [&](int place) {
    return built_in_gpu(cards[static_cast<size_t>(place)].name).bf16_flops;
  };
  std::stable_sort(places.begin(), places.end(), [&](int a, int b) { return peak(a) > peak(b); });
  return places;
}

bool alike(const std::vector<GpuFacts>& cards) {
  return std::all_of(cards.begin(), cards.end(), [&](const GpuFacts& card) {
    return card.name == cards[0].name && card.memory == cards[0].memory;
  });
}

// CUDA reads numbers as strtol does: " 1" and "1x" are 1. -1 if there is no number.
int leading_number(const std::string& entry) {
  const size_t first = std::min(entry.find_first_not_of(" \t"), entry.size());
  int number = -1;
  std::from_chars(entry.data() + first, entry.data() + entry.size(), number);
  return number;
}

GpuFacts card_at(const std::vector<GpuFacts>& cards, int place) {
  GpuFacts card = cards[static_cast<size_t>(place)];
  card.card = place;
  return card;
}

std::optional<GpuFacts> named_by_uuid(const std::vector<GpuFacts>& cards, const std::string& beginning) {
  const GpuFacts unchecked{.name = "", .uuid = beginning};
  if (beginning.starts_with("MIG-")) return unchecked;
  std::optional<GpuFacts> found;
  bool all_known = true;
  for (size_t i = 0; i < cards.size(); ++i) {
    all_known = all_known && !cards[i].uuid.empty();
    if (!cards[i].uuid.starts_with(beginning)) continue;
    if (found) return std::nullopt;  // several cards have this prefix
    found = card_at(cards, static_cast<int>(i));
  }
  return found || all_known ? found : std::optional(unchecked);
}

}  // namespace

VisibleGpus visible_gpus(const std::vector<GpuFacts>& cards,
                         const std::optional<std::string>& visible_devices, const std::string& device_order) {
  const bool by_pci = device_order == "PCI_BUS_ID";
  const std::vector<int> numbered = numbering(cards, by_pci);
  VisibleGpus out{.gpus = {}, .order_guessed = !by_pci && !alike(cards)};
  if (!visible_devices) {
    for (const int place : numbered) out.gpus.push_back(card_at(cards, place));
    return out;
  }
  bool any_number = false;
  std::istringstream entries(*visible_devices);
  for (std::string entry; std::getline(entries, entry, ',');) {
    if (entry.starts_with("GPU-") || entry.starts_with("MIG-")) {
      std::optional<GpuFacts> gpu = named_by_uuid(cards, entry);
      if (!gpu) break;
      out.gpus.push_back(std::move(*gpu));
    } else {
      const int number = leading_number(entry);
      if (number < 0 || number >= static_cast<int>(numbered.size())) break;
      out.gpus.push_back(card_at(cards, numbered[static_cast<size_t>(number)]));
      any_number = true;
    }
    const GpuFacts& last = out.gpus.back();
    const auto same = [&](const GpuFacts& gpu) { return gpu.card == last.card && gpu.uuid == last.uuid; };
    if (std::count_if(out.gpus.begin(), out.gpus.end(), same) > 1) return {};
  }
  out.order_guessed = out.order_guessed && any_number;
  return out;
}

}  // namespace lm
