#include "export/combine_adapters.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "spec/adapter_sites.h"
#include "spec/expert_adapters.h"
#include "weights/adapter_files.h"
#include "weights/peft_modules.h"
#include "weights/product_svd.h"

namespace lm {
namespace {

// One module's adapter: b [rows, r] * a [r, columns], row-major, and what it is multiplied by.
struct Pair {
  std::vector<float> a, b;
  int64_t r = 0;
  double factor = 1;
};
using Pairs = std::map<std::string, Pair, std::less<>>;  // by the module's path

[[noreturn]] void refuse(const std::string& what, const std::string& place, const std::string& next) {
  throw Error(Exit::kInput,
              {.area = "FILE-27", .what = what, .place = place, .next = next, .kept = "nothing was written"});
}

std::string module_path(const TensorPlace& place) {
  return std::string(module_of(place.parameter.owner));
}

AdapterSpec read_spec(const ModelSpec& base, const WeightedAdapter& adapter) {
  AdapterSpec spec = read_adapter_config(adapter.directory, &base).spec;
  if (spec.virtual_tokens > 0)
    refuse("this adapter has virtual tokens, which cannot be added to another adapter", adapter.directory,
           "combine LoRA adapters");
  if (spec.kind != AdapterKind::kLora)
    refuse("this adapter has no pairs of low rank, and others cannot be added to it", adapter.directory,
           "combine LoRA adapters, or merge this one into its base model: lmlaunch export " +
               adapter.directory + " --merge -o DIR");
  if (spec.dora)
    refuse("this is a DoRA adapter, whose magnitudes fit no other adapter beside it", adapter.directory,
           "combine LoRA adapters, or merge this one into its base model: lmlaunch export " +
               adapter.directory + " --merge -o DIR");
  if (!spec.also.empty() || !spec.tokens.empty())
    refuse(
        "this adapter has tensors of the model itself (modules_to_save or trainable_token_indices), which "
        "cannot be added to another adapter's",
        adapter.directory,
        "use it alone and with weight 1, or merge it into its base model: lmlaunch export " +
            adapter.directory + " --merge -o DIR");
  if (adapts_experts(base, spec))
    refuse("this adapter has pairs of experts (target_parameters), which are not added to those of others",
           adapter.directory,
           "use it alone and with weight 1, or merge it into its base model: lmlaunch export " +
               adapter.directory + " --merge -o DIR");
  if (spec.bias != AdapterBias::kNone)
    refuse(
        "this adapter has trained biases, which cannot be added to those of others", adapter.directory,
        "combine adapters whose bias is \"none\", or merge this one into its base model: lmlaunch export " +
            adapter.directory + " --merge -o DIR");
  return spec;
}

Pairs read_pairs(const ModelSpec& base, const WeightedAdapter& adapter, const AdapterSpec& spec,
                 int threads) {
  Pairs out;
  const ModelLayout layout = make_layout(base, &spec, DType::kF32);
  const auto target = [&](size_t, const TensorPlace& place) {
    Pair& pair = out[module_path(place)];
    const bool is_a = place.parameter.role == TrainableRole::kLoraA;
    std::vector<float>& values = is_a ? pair.a : pair.b;
    values.resize(static_cast<size_t>(place.parameter.elements()));
    if (is_a) pair.r = place.parameter.rows;
    return LoadTarget{reinterpret_cast<std::byte*>(values.data()), DType::kF32};
  };
  load_adapter(adapter.directory, layout, target, {.threads = threads});
  for (auto& [path, pair] : out) pair.factor = adapter.weight * spec.scale_of(path);
  return out;
}

// The adapters of one module, in the order of the adapters.
using Together = std::vector<const Pair*>;

Together pairs_of(const std::vector<Pairs>& adapters, std::string_view path) {
  Together out;
  for (const Pairs& pairs : adapters) {
    const auto it = pairs.find(path);
    if (it != pairs.end()) out.push_back(&it->second);
  }
  return out;
}

int64_t total_rank(const Together& pairs) {
  int64_t sum = 0;
  for (const Pair* pair : pairs) sum += pair->r;
  return sum;
}

Pair concatenated(const Together& pairs) {
  Pair out{.a = {}, .b = {}, .r = total_rank(pairs)};
  const size_t rows = pairs.front()->b.size() / static_cast<size_t>(pairs.front()->r);
  const auto all = static_cast<size_t>(out.r);
  out.b.resize(rows * all);
  size_t column = 0;
  for (const Pair* pair : pairs) {
    const auto r = static_cast<size_t>(pair->r);
    for (const float value : pair->a) out.a.push_back(static_cast<float>(value * pair->factor));
    for (size_t i = 0; i < pair->b.size(); ++i) out.b[i / r * all + column + i % r] = pair->b[i];
    column += r;
  }
  return out;
}

// The sign of the factor is A's.
Pair added(const Together& pairs) {
  Pair out{.a = std::vector<float>(pairs.front()->a.size()),
           .b = std::vector<float>(pairs.front()->b.size()),
           .r = pairs.front()->r};
  for (const Pair* pair : pairs) {
    const double root = std::sqrt(std::abs(pair->factor));
    const auto of_b = static_cast<float>(root), of_a = static_cast<float>(std::copysign(root, pair->factor));
    for (size_t i = 0; i < out.a.size(); ++i) out.a[i] += of_a * pair->a[i];
    for (size_t i = 0; i < out.b.size(); ++i) out.b[i] += of_b * pair->b[i];
  }
  return out;
}

Pair approximated(const Together& pairs, int64_t rank) {
  const Pair whole = concatenated(pairs);
  ProductSvd svd = product_svd(whole.b, whole.a, whole.r, rank);
  return {.a = std::move(svd.right), .b = std::move(svd.left), .r = rank};
}

// The rank that a module gets. `path` and `place` are for messages.
int64_t combined_rank(const Together& pairs, const CombineOptions& options, const std::string& path,
                      const std::string& place) {
  switch (options.how) {
    case Combination::kCat:
      if (total_rank(pairs) > kMostRank)
        refuse(fmt::format("the ranks add up to {}, more than {}", total_rank(pairs), kMostRank), path,
               "choose a rank: --type svd --rank N");
      return total_rank(pairs);
    case Combination::kSvd:
      return options.rank;
    case Combination::kLinear:
      for (const Pair* pair : pairs) {
        if (pair->r != pairs.front()->r)
          refuse(fmt::format("linear adds matrices of one shape, and adapters of {} have the ranks {} and {}",
                             path, pairs.front()->r, pair->r),
                 place, "take --type cat or --type svd, which combine any ranks");
      }
      return pairs.front()->r;
  }
  LM_CHECK(false, "a combination");
}

CombineOptions with_rank(CombineOptions options, const std::vector<Pairs>& adapters) {
  int64_t largest = 0, total = 0;
  for (const Pairs& pairs : adapters) {
    int64_t own = 0;
    for (const auto& [path, pair] : pairs) own = std::max(own, pair.r);
    largest = std::max(largest, own);
    total += own;
  }
  if (options.rank > total)
    refuse(fmt::format("rank {} is more than the adapters' ranks together, {}", options.rank, total),
           "--rank", "take --type cat, which is exact with that rank");
  if (options.rank == 0) options.rank = largest;
  return options;
}

Pair combined(const Together& pairs, const CombineOptions& options) {
  switch (options.how) {
    case Combination::kCat:
      return concatenated(pairs);
    case Combination::kSvd:
      return approximated(pairs, options.rank);
    case Combination::kLinear:
      return added(pairs);
  }
  LM_CHECK(false, "a combination");
}

}  // namespace

CombinedAdapter::CombinedAdapter(const ModelSpec& base, std::span<const WeightedAdapter> adapters,
                                 const CombineOptions& asked) {
  std::vector<Pairs> read;
  for (const WeightedAdapter& adapter : adapters) {
    const AdapterSpec spec = read_spec(base, adapter);
    if (read.empty()) spec_.dropout = spec.dropout;
    read.push_back(read_pairs(base, adapter, spec, asked.threads));
  }
  const CombineOptions options = with_rank(asked, read);
  const std::vector<AdapterModule> modules = lora_modules(base);
  std::vector<AdapterSite> sites;
  for (size_t m = 0; m < modules.size(); ++m) {
    const Together pairs = pairs_of(read, modules[m].path);
    if (pairs.empty()) continue;
    const int64_t r = combined_rank(pairs, options, modules[m].path, adapters.front().directory);
    sites.push_back({.module = m, .r = r, .alpha = static_cast<double>(r)});
    spec_.r = std::max(spec_.r, r);
  }
  spec_.alpha = static_cast<double>(spec_.r);
  set_sites(modules, sites, spec_);
  layout_ = make_layout(base, &spec_, DType::kF32);
  struct Work {
    size_t block;
    const TensorPlace *a, *b;
  };
  std::vector<Work> work;
  for (size_t b = 0; b < layout_.blocks.size(); ++b) {
    const BlockLayout& block = layout_.blocks[b];
    blocks_.emplace_back(static_cast<size_t>(block.flat_elements));
    for (const Trainable& entry : block.trainables) {
      if (entry.role != TrainableRole::kLoraA) continue;
      work.push_back({b, &block.tensors[entry.tensor],
                      block.beside(block.tensors[entry.owner], entry.part, TrainableRole::kLoraB)});
    }
  }
  parallel_for(asked.threads, std::ssize(work), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Work& one = work[static_cast<size_t>(i)];
      const Pair pair = combined(pairs_of(read, module_path(*one.a)), options);
      std::ranges::copy(pair.a, blocks_[one.block].begin() + one.a->offset);
      std::ranges::copy(pair.b, blocks_[one.block].begin() + one.b->offset);
    }
  });
}

WeightView CombinedAdapter::view(size_t block, const TensorPlace& place) const {
  return {reinterpret_cast<const std::byte*>(blocks_.at(block).data() + place.offset), DType::kF32};
}

}  // namespace lm
