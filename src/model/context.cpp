#include "model/context.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/host_device.h"

namespace lm {
namespace {

// How many documents a GPU's attention is given at once. One that continues a text has keys of its own.
int64_t at_once(const Context& context, int64_t documents, bool continued) {
  if (continued) return 1;
  return context.documents_at_once > 0 ? std::min(context.documents_at_once, documents) : documents;
}

// Where each document begins, counted from the first token of those together, is appended to `starts`.
std::vector<DocumentRun> split_documents(const Context& context, const Batch& batch, bool continued,
                                         std::vector<int32_t>& starts) {
  std::vector<DocumentRun> out;
  const std::vector<int32_t>& begin = batch.document_start;
  for (int64_t d = 0; d < batch.documents();) {
    const int64_t count = at_once(context, batch.documents() - d, continued);
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
    : positions_(positions), memory_(device, bytes(spec, positions)) {
  const auto rounded = [dtype](float x) { return as_stored(dtype, x); };
  std::vector<float> table(static_cast<size_t>(memory_.size()) / sizeof(float));
  float* out = table.data();
  for (const RopeSpec& rope : spec.ropes) {
    const std::vector<float> frequencies = rope_frequencies(rope, positions);
    const auto factor = static_cast<float>(rope.attention_factor);
    elements_.push_back(positions * std::ssize(frequencies));
    for (int64_t p = 0; p < positions; ++p) {
      for (const float frequency : frequencies) {
        const float angle = static_cast<float>(p) * frequency;
        *out = rounded(std::cos(angle) * factor);
        out[elements_.back()] = rounded(std::sin(angle) * factor);
        ++out;
      }
    }
    out += elements_.back();
  }
  if (table.empty()) return;  // a model without RoPE
  copy_bytes(memory_.data(), table.data(), memory_.size(), stream);
  synchronize(stream);  // the table is gone when this returns
}

int64_t RopeTable::bytes(const ModelSpec& spec, int64_t positions) {
  int64_t bytes = 0;
  for (const RopeSpec& rope : spec.ropes)
    bytes += 2 * positions * (rope.dim / 2) * static_cast<int64_t>(sizeof(float));
  return bytes;
}

const float* RopeTable::cosines(int rope) const {
  const auto* table = reinterpret_cast<const float*>(memory_.data());
  for (int i = 0; i < rope; ++i) table += 2 * elements_[static_cast<size_t>(i)];
  return table;
}

void accumulate(const Context& context, const View& to, const View& from, bool overwrite) {
  context.kernels.accumulate({.to = to.data,
                              .from = from.data,
                              .elements = from.elements(),
                              .to_dtype = to.dtype,
                              .from_dtype = from.dtype,
                              .overwrite = overwrite},
                             context.stream);
}

void zero_surplus(const Context& context, const View& x, int64_t used) {
  if (x.rows > used) context.kernels.zero(x.row_range(used, x.rows - used), context.stream);
}

DeviceBatch allocate_batch(const Context& context, const BatchShape& shape) {
  const bool gpu = context.device == DeviceType::kCuda;
  // Rows with targets, these and their weights; on a GPU tokens, positions, samples and the documents' starts
  // as well.
  const int64_t of_targets = (shape.weighted ? 3 : 2) * shape.targets;
  int64_t numbers = of_targets;
  if (gpu) {
    const int64_t runs = ceil_div(shape.documents, at_once(context, shape.documents, shape.continued));
    numbers += 3 * shape.tokens + shape.documents + runs + (shape.continued ? 2 * runs : 0);
  }
  auto* const memory = reinterpret_cast<const int32_t*>(context.arena.allocate(numbers * 4));
  DeviceBatch out{.tokens = shape.tokens,
                  .rows = context.rounded(shape.tokens),
                  .targets = {.count = shape.targets, .row = memory, .target = memory + shape.targets},
                  .document_count = shape.documents,
                  .runs = {},
                  .caches = {}};
  if (shape.weighted) out.targets.weight = reinterpret_cast<const float*>(memory + 2 * shape.targets);
  if (gpu) {
    out.token = memory + of_targets;
    out.position = out.token + shape.tokens;
    out.sample = out.position + shape.tokens;
  }
  return out;
}

DeviceBatch place_batch(const Context& context, const Batch& batch,
                        std::span<const KeyValueCache* const> caches) {
  const bool continued = !caches.empty();
  LM_CHECK(!continued || std::ssize(caches) == batch.documents(), "a cache for every document");
  // One list of 32-bit numbers, as one copy brings them: weights by their bits.
  std::vector<int32_t> all, target, weight;
  const bool weighted = !batch.weight.empty();
  LM_CHECK(!weighted || batch.weight.size() == batch.target.size(), "a weight for every target");
  for (size_t t = 0; t < batch.target.size(); ++t) {
    if (batch.target[t] < 0) continue;
    all.push_back(static_cast<int32_t>(t));
    target.push_back(batch.target[t]);
    if (weighted) weight.push_back(std::bit_cast<int32_t>(batch.weight[t]));
  }
  DeviceBatch out = allocate_batch(context, {.tokens = batch.tokens(),
                                             .targets = std::ssize(target),
                                             .documents = batch.documents(),
                                             .weighted = weighted,
                                             .continued = continued});
  out.document_start = batch.document_start.data();
  out.caches.assign(caches.begin(), caches.end());
  // Where there is no kernel for one row there are two: LibTorch on a GPU takes an addend of one row for a
  // bias, and another library for the product.
  if (continued && batch.tokens() == 1) out.rows = context.kernels.multiply_row != nullptr ? 1 : 2;
  all.insert(all.end(), target.begin(), target.end());
  all.insert(all.end(), weight.begin(), weight.end());
  if (context.device == DeviceType::kCpu) {
    out.token = batch.token.data();
    out.position = batch.position.data();
    out.sample = batch.sample.data();
  } else {
    std::vector<int32_t> starts;
    out.runs = split_documents(context, batch, continued, starts);
    const int32_t* start = out.sample + batch.tokens();
    for (DocumentRun& run : out.runs) {
      run.start = start;
      start += run.count + 1;
    }
    for (size_t text = 0; text < caches.size(); ++text) {
      out.runs[text].key_start = start;
      start += 2;
      starts.insert(starts.end(), {0, static_cast<int32_t>(caches[text]->tokens() + out.runs[text].tokens)});
    }
    for (const std::vector<int32_t>* array :
         {&batch.token, &batch.position, &batch.sample, &std::as_const(starts)})
      all.insert(all.end(), array->begin(), array->end());
  }
  context.uploads.send(const_cast<int32_t*>(out.targets.row), all.data(), std::ssize(all) * 4,
                       context.stream);
  return out;
}

}  // namespace lm
