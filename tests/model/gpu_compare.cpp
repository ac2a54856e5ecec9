#include "gpu_compare.h"

#include <cmath>
#include <cstdio>
#include <limits>

namespace lm {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// What two arrays have in common, in fp64.
struct Sums {
  double dot = 0, device = 0, cpu = 0, difference = 0;  // of squares
  double largest = 0, largest_difference = 0;
  bool sound = true;

  void add(const std::vector<float>& d, const std::vector<float>& c) {
    sound = sound && d.size() == c.size();
    for (size_t i = 0; sound && i < c.size(); ++i) {
      const double x = d[i], y = c[i], apart = x - y;
      if (!std::isfinite(x) || !std::isfinite(y)) sound = false;
      dot += x * y, device += x * x, cpu += y * y, difference += apart * apart;
      largest = std::max(largest, std::abs(y));
      largest_difference = std::max(largest_difference, std::abs(apart));
    }
  }
  double ratio(double part, double whole) const {
    if (!sound) return kInfinite;
    return part == 0 ? 0 : whole == 0 ? kInfinite : part / whole;
  }
  double of_largest() const { return ratio(largest_difference, largest); }
  double of_norm() const { return ratio(std::sqrt(difference), std::sqrt(cpu)); }
  double turn() const {
    if (!sound || (device == 0) != (cpu == 0)) return kInfinite;
    return cpu == 0 ? 0 : std::max(0.0, 1 - dot / std::sqrt(device * cpu));
  }
  double length() const { return ratio(std::abs(std::sqrt(device) - std::sqrt(cpu)), std::sqrt(cpu)); }
};

void keep(Worst& worst, double value, const std::string& where) {
  if (value > worst.value) worst = {value, where};
}

double relative(double device, double cpu) {
  const double apart = std::abs(device - cpu);
  return std::isfinite(apart) ? apart / std::abs(cpu) : kInfinite;
}

// Calls visit(name, sums) for each tensor; a set of names that differs is unsound.
template <class Visit>
void each_tensor(const Tensors& device, const Tensors& cpu, const Visit& visit) {
  for (const auto& [name, values] : cpu) {
    const auto found = device.find(name);
    Sums sums;
    sums.add(found == device.end() ? std::vector<float>() : found->second, values);
    visit(name, sums);
  }
}

}  // namespace

Differences compare(const Outcome& device, const Outcome& cpu) {
  Differences out;
  Sums logits;
  logits.add(device.logits, cpu.logits);
  out.logits = logits.of_largest();
  out.loss = relative(device.evaluated, cpu.evaluated);
  for (size_t i = 0; i < cpu.losses.size(); ++i) {
    out.loss = std::max(out.loss, relative(device.losses.at(i), cpu.losses[i]));
    out.norm = std::max(out.norm, relative(device.norms.at(i), cpu.norms[i]));
  }
  if (!device.gradients.empty()) {
    each_tensor(device.gradients, cpu.gradients, [&](const std::string& name, const Sums& sums) {
      keep(out.gradient, sums.of_largest(), name);
      keep(out.direction, sums.turn(), name);
      keep(out.length, sums.length(), name);
    });
  }
  Sums all;
  each_tensor(device.change, cpu.change, [&](const std::string& name, const Sums& sums) {
    keep(out.change_of_one, sums.of_norm(), name);
    keep(out.turn, sums.turn(), name);
    all.add(device.change.at(name), cpu.change.at(name));
  });
  out.change = all.of_norm();
  out.whole_turn = all.turn();
  return out;
}

std::string text(const Differences& d) {
  char line[512];
  std::snprintf(
      line, sizeof line,
      "logits %.1e loss %.1e norm %.1e | gradient %.1e (%s) direction %.1e (%s) length %.1e | change "
      "%.1e worst %.1e (%s) turn %.1e worst %.1e (%s)",
      d.logits, d.loss, d.norm, d.gradient.value, d.gradient.where.c_str(), d.direction.value,
      d.direction.where.c_str(), d.length.value, d.change, d.change_of_one.value,
      d.change_of_one.where.c_str(), d.whole_turn, d.turn.value, d.turn.where.c_str());
  return line;
}

}  // namespace lm
