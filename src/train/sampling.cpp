#include "train/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/philox.h"

namespace lm {
namespace {

// A nucleus seldom has more tokens: so many are sorted first, then eight times as many.
constexpr int64_t kFirstSorted = 256, kMoreSorted = 8;

// The tokens in descending order of their logits, sorted on demand; `order` has the first ones.
class Order {
 public:
  explicit Order(std::span<const float> logits) : logits_(logits), tokens_(logits.size()) {
    std::iota(tokens_.begin(), tokens_.end(), 0);
  }
  int64_t size() const { return std::ssize(tokens_); }
  int32_t operator[](int64_t rank) {
    while (rank >= sorted_) sort_more();
    return tokens_[static_cast<size_t>(rank)];
  }

 private:
  void sort_more() {
    const int64_t end = std::min(size(), std::max(kFirstSorted, sorted_ * kMoreSorted));
    const auto before = [&](int32_t a, int32_t b) {
      const float x = logits_[static_cast<size_t>(a)], y = logits_[static_cast<size_t>(b)];
      return x != y ? x > y : a < b;
    };
    std::partial_sort(tokens_.begin() + sorted_, tokens_.begin() + end, tokens_.end(), before);
    sorted_ = end;
  }

  std::span<const float> logits_;
  std::vector<int32_t> tokens_;
  int64_t sorted_ = 0;
};

// In [0, 1), 53 bits of it.
double uniform(uint64_t seed, int64_t place) {
  return static_cast<double>(philox_key(seed, Purpose::kSampling, static_cast<uint64_t>(place), 0) >> 11) *
         0x1p-53;
}

}  // namespace

std::vector<Candidate> candidates(const Sampling& sampling, std::span<const float> logits) {
  Order order(logits);
  const auto logit = [&](int64_t rank) { return double{logits[static_cast<size_t>(order[rank])]}; };
  const double top = logit(0);
  const auto weight = [&](double x) { return std::exp((x - top) / sampling.temperature); };
  int64_t kept = order.size();
  if (sampling.top_k > 0 && sampling.top_k < kept) {
    // Ties with the k-th token are kept, too.
    const double least = logit(sampling.top_k - 1);
    for (kept = sampling.top_k; kept < order.size() && logit(kept) == least;) ++kept;
  }
  double all = 0;
  if (kept < order.size()) {
    for (int64_t rank = 0; rank < kept; ++rank) all += weight(logit(rank));
  } else {
    for (const float x : logits) all += weight(x);
  }
  std::vector<Candidate> out;
  double sum = 0;
  for (int64_t rank = 0; rank < kept; ++rank) {
    if (rank > 0 && sampling.top_p < 1 && sum >= sampling.top_p * all) break;
    const double x = weight(logit(rank));
    out.push_back({order[rank], x});
    sum += x;
  }
  return out;
}

int32_t choose_token(const Sampling& sampling, std::span<const float> logits, int64_t place) {
  if (sampling.temperature <= 0)
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const std::vector<Candidate> some = candidates(sampling, logits);
  double sum = 0;
  for (const Candidate& one : some) sum += one.weight;
  double left = uniform(sampling.seed, place) * sum;
  for (const Candidate& one : some) {
    left -= one.weight;
    if (left < 0) return one.token;
  }
  return some.back().token;
}

}  // namespace lm
