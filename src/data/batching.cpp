#include "data/batching.h"

#include <fmt/format.h>
#include <algorithm>
#include <numeric>

#include "base/bytes.h"
#include "base/error.h"
#include "data/batch_source.h"

namespace lm {
namespace {

// Parts a scored example, which begins at token `at` of the batch, into its documents: a second one begins
// where the mask is 0. The last token that is not `pad` gets the document's target.
void part_scored(const ExampleView& view, size_t at, int32_t pad, Batch& batch) {
  const size_t end = batch.token.size();
  for (size_t begin = at; begin < end;) {
    size_t next = begin + 1;
    while (next < end && view.trained[next - at] != 0) ++next;
    if (begin > at) batch.document_start.push_back(static_cast<int32_t>(begin));
    size_t last = next - 1;
    while (last > begin && batch.token[last] == pad) --last;
    for (size_t i = begin; i < next; ++i) {
      batch.position[i] = static_cast<int32_t>(i - begin);
      batch.target[i] = i == last ? 0 : -1;
    }
    begin = next;
  }
}

}  // namespace

void append_document(const DocumentView& document, const std::optional<ScoredData>& scored, Batch& batch) {
  const ExampleView& view = document.text;
  const size_t n = view.tokens.size(), at = batch.token.size();
  batch.document_start.push_back(static_cast<int32_t>(at));
  // Any token will do for the virtual ones.
  const auto before = static_cast<size_t>(document.virtual_tokens), first = at + before;
  batch.token.insert(batch.token.end(), before, view.tokens.front());
  batch.token.insert(batch.token.end(), view.tokens.begin(), view.tokens.end());
  batch.sample.insert(batch.sample.end(), before + n, document.sample);
  batch.position.resize(first + n);
  std::iota(batch.position.begin() + static_cast<std::ptrdiff_t>(at), batch.position.end(), 0);
  batch.target.resize(first + n, -1);
  for (size_t i = 0; i < n; ++i)
    batch.target[first + i] = i + 1 < n && view.trained[i + 1] != 0 ? view.tokens[i + 1] : -1;
  if (!scored) return;
  LM_CHECK(before == 0, "a scored text has no virtual tokens");
  part_scored(view, at, scored->pad_token, batch);
  batch.label.insert(batch.label.end(), document.labels.begin(), document.labels.end());
}

int64_t first_foreign(std::span<const int32_t> tokens, int64_t vocab) {
  // As unsigned numbers, so that a negative id is too large, too.
  uint32_t largest = 0;
  for (const int32_t id : tokens) largest = std::max(largest, static_cast<uint32_t>(id));
  if (static_cast<uint64_t>(largest) < static_cast<uint64_t>(vocab)) return -1;
  return std::ranges::find_if(
             tokens, [&](int32_t id) { return static_cast<uint32_t>(id) >= static_cast<uint64_t>(vocab); }) -
         tokens.begin();
}

void refuse_token(int64_t position, int32_t id, int64_t vocab, const std::string& name) {
  throw Error(Exit::kInput, {.area = "DATA-24",
                             .what = fmt::format("token {} = {} is outside the model's vocabulary of {}",
                                                 position, id, vocab),
                             .place = name,
                             .next = "use the tokenizer that belongs to model.path"});
}

std::vector<MicroRange> micro_ranges(int64_t count, int64_t micro_batch, int rank, int world) {
  std::vector<MicroRange> out;
  const int64_t begin = count * rank / world, end = count * (rank + 1) / world;
  for (int64_t s = begin; s < end; s += micro_batch) out.push_back({s, std::min(end, s + micro_batch)});
  const int64_t most = ceil_div(ceil_div(count, world), micro_batch);
  while (std::ssize(out) < most) out.push_back({0, 1, true});
  return out;
}

void check_fingerprint(const LoaderPosition& position, int64_t fingerprint, const std::string& name) {
  if (position.fingerprint == fingerprint) return;
  throw Error(
      Exit::kInput,
      {.area = "DATA-24",
       .what = "the tokenized dataset differs from the one this run started with: the data, the tokenizer or "
               "the chat template has changed",
       .place = name,
       .next = "restore the files of data.train and the tokenizer's files in model.path, or start in another "
               "run.dir"});
}

void refuse_position(const LoaderPosition& position) {
  throw Error(Exit::kIncompatible, {.area = "CKPT-26",
                                    .what = "the saved data position is outside the epoch",
                                    .place = fmt::format("epoch {} step {}", position.epoch, position.step),
                                    .next = "resume with the batch size and data options of the run"});
}

}  // namespace lm
