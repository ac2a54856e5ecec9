#include "model/context.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace lm {
namespace {

// The documents of a batch, at most `at_once` together; where each begins is appended to `starts`, counted
// from the first token of those together.
std::vector<DocumentRun> split_documents(const Batch& batch, int64_t at_once, std::vector<int32_t>& starts) {
  std::vector<DocumentRun> out;
  const std::vector<int32_t>& begin = batch.document_start;
  for (int64_t d = 0; d < batch.documents();) {
    const int64_t count = at_once > 0 ? std::min(at_once, batch.documents() - d) : batch.documents();
    const auto at = [&](int64_t i) { return begin[static_cast<size_t>(d + i)]; };
    DocumentRun part{.first = at(0), .tokens = at(count) - at(0), .count = count};
    for (int64_t i = 0; i <= count; ++i) {
      starts.push_back(at(i) - at(0));
      if (i > 0) part.longest = std::max<int64_t>(part.longest, at(i) - at(i - 1));
    }
    out.push_back(part);
    d += count;
  }
  return out;
}

}  // namespace

RopeTable::RopeTable(const ModelSpec& spec, int64_t positions, DType dtype, DeviceType device,
                     StreamView stream)
    : positions_(positions),
      elements_(positions * (spec.head_dim / 2)),
      memory_(device, 2 * elements_ * static_cast<int64_t>(sizeof(float))) {
  const std::vector<float> frequency = rope_frequencies(spec);
  const auto half = static_cast<int64_t>(frequency.size());
  std::vector<float> table(static_cast<size_t>(2 * elements_));
  const auto rounded = [dtype](float x) {
    return dtype == DType::kBF16 ? static_cast<float>(c10::BFloat16(x)) : x;
  };
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * frequency[static_cast<size_t>(i)];
      table[static_cast<size_t>(p * half + i)] = rounded(std::cos(angle));
      table[static_cast<size_t>(elements_ + p * half + i)] = rounded(std::sin(angle));
    }
  }
  copy_bytes(memory_.data(), table.data(), memory_.size(), stream);
  synchronize(stream);  // the table is gone when this returns
}

void zero_surplus(const at::Tensor& x, int64_t used) {
  if (x.size(0) > used) x.narrow(0, used, x.size(0) - used).zero_();
}

DeviceBatch place_batch(const Context& context, const Batch& batch) {
  std::vector<int32_t> row, target;
  for (size_t t = 0; t < batch.target.size(); ++t) {
    if (batch.target[t] < 0) continue;
    row.push_back(static_cast<int32_t>(t));
    target.push_back(batch.target[t]);
  }
  DeviceBatch out{.host = &batch,
                  .token = batch.token.data(),
                  .position = batch.position.data(),
                  .sample = batch.sample.data(),
                  .documents = {},
                  .targets = {.count = std::ssize(row)},
                  .rows = context.rounded(batch.tokens())};
  std::vector<std::pair<const std::vector<int32_t>*, const int32_t**>> arrays = {
      {&row, &out.targets.row}, {&target, &out.targets.target}};
  std::vector<int32_t> starts;
  const int32_t* first_start = nullptr;
  if (context.device == DeviceType::kCuda) {
    out.documents = split_documents(batch, context.documents_at_once, starts);
    arrays.insert(arrays.end(), {{&batch.token, &out.token},
                                 {&batch.position, &out.position},
                                 {&batch.sample, &out.sample},
                                 {&starts, &first_start}});
  }
  std::vector<int32_t> all;
  for (const auto& [values, place] : arrays) all.insert(all.end(), values->begin(), values->end());
  const int64_t bytes = std::ssize(all) * static_cast<int64_t>(sizeof(int32_t));
  const auto* const memory = reinterpret_cast<const int32_t*>(context.arena.allocate(bytes));
  context.uploads.send(const_cast<int32_t*>(memory), all.data(), bytes, context.stream);
  int64_t first = 0;
  for (const auto& [values, place] : arrays) {
    *place = memory + first;
    first += std::ssize(*values);
  }
  for (DocumentRun& part : out.documents) {
    part.start = first_start;
    first_start += part.count + 1;
  }
  return out;
}

}  // namespace lm
