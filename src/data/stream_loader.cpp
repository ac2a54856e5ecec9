#include "data/stream_loader.h"

#include <fmt/format.h>
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "data/piece_checks.h"

namespace lm {
namespace {

// An anchor has up to 2 KiB; resuming reads some more documents than there are between two.
constexpr int64_t kAnchorsApart = 1024;

bool valid(const StreamAnchor& anchor, const LoaderOptions& options, int64_t taken) {
  const RowPosition& rows = anchor.rows;
  for (const int64_t number : {rows.file, rows.row, rows.byte, rows.rows, rows.done, anchor.skip,
                               anchor.examples, anchor.window, anchor.sequences})
    if (number < 0) return false;
  const int64_t open = options.packing ? std::min(anchor.sequences, kOpenSequences) : 0;
  return anchor.sequences <= taken && std::ssize(anchor.room) == open &&
         std::ranges::all_of(anchor.room,
                             [&](int64_t room) { return room >= 0 && room < options.max_length; });
}

}  // namespace

StreamLoader::StreamLoader(RowStream& rows, const StreamOptions& options)
    : options_(options),
      reader_(rows, options_.sequences),
      window_(reader_, options.window, options.sequences.shuffle, options.sequences.seed),
      packer_(options.sequences.packing, options.sequences.max_length, options.sequences.virtual_tokens),
      position_{.fingerprint = options.fingerprint} {
  LM_CHECK(options.sequences.weights.empty(), "weights of entries need all of an epoch");
}

void StreamLoader::restore(const LoaderPosition& position) {
  there_ = there_ && position.epoch == position_.epoch && position.step == position_.step &&
           position.fingerprint == position_.fingerprint;
  position_ = position;
}

double StreamLoader::epochs() {
  const auto whole = static_cast<double>(position_.epoch);
  return position_.step == 0 ? whole : whole + window_.share();
}

void StreamLoader::resume() {
  const StreamAnchor anchor = position_.stream.value_or(StreamAnchor{});
  if (position_.epoch < 0 || position_.step < 0) refuse_position(position_);
  const int64_t taken = position_.step * options_.sequences.global_batch;
  if (!valid(anchor, options_.sequences, taken)) refuse_position(position_);
  window_.seek(position_.epoch, {anchor.rows, anchor.skip, anchor.examples}, anchor.window);
  packer_.resume(anchor.sequences, anchor.room, taken);
  ended_ = false;
  whole_ = anchor == StreamAnchor{};
  anchors_.assign(1, anchor);
  since_anchor_ = 0;
}

void StreamLoader::add_anchor() {
  if (since_anchor_ < kAnchorsApart) return;
  const DocumentPosition& start = window_.start();
  anchors_.push_back({.rows = start.rows,
                      .skip = start.skip,
                      .examples = start.examples,
                      .window = window_.window(),
                      .sequences = packer_.begun(),
                      .room = packer_.room()});
  since_anchor_ = 0;
}

void StreamLoader::fill() {
  while (!ended_ && packer_.ready() <= options_.sequences.global_batch) {
    std::optional<Document> document = window_.next();
    if (!document) {
      packer_.finish();
      ended_ = true;
      return;
    }
    if (window_.begun()) add_anchor();
    ++since_anchor_;
    packer_.add(std::move(*document));
  }
}

// Warnings after the first window, and all counts after the first epoch, if this process has read all of it.
void StreamLoader::report_once() {
  const std::string& name = options_.sequences.name;
  const int64_t length = options_.sequences.max_length;
  if (!options_.reports || position_.epoch > 0 || !whole_) return;
  if (!std::exchange(warned_, true) && !options_.sequences.scored)
    warn_of_losses(name + " (the first rows)", reader_.counts(), length);
  if (ended_ && !std::exchange(reported_, true))
    log_line("data: train: " + describe_counts(reader_.counts(), length));
}

StepBatches StreamLoader::next() {
  const LoaderOptions& options = options_.sequences;
  check_fingerprint(position_, options_.fingerprint, options.name);
  if (!there_) resume();
  there_ = false;  // until the step is complete: an error leaves the rows elsewhere
  fill();
  const int64_t count = std::min(options.global_batch, packer_.ready());
  if (count == 0 && position_.step == 0) check_targets(options.name, reader_.counts());
  if (count == 0) refuse_position(position_);
  report_once();
  std::vector<std::vector<Document>> sequences;
  StepBatches batches;
  for (int64_t s = 0; s < count; ++s) {
    for (const Document& document : sequences.emplace_back(packer_.take())) {
      batches.target_tokens += document.targets;
      batches.tokens += std::ssize(document.tokens);
    }
  }
  for (const MicroRange& micro : micro_ranges(count, options.micro_batch, options.rank, options.world)) {
    batches.micro.push_back(assemble(sequences, micro));
    if (micro.filler) std::ranges::fill(batches.micro.back().target, -1);
  }
  advance();
  return batches;
}

void StreamLoader::advance() {
  there_ = true;
  if (ended_ && packer_.ready() == 0) {
    position_ = {.epoch = position_.epoch + 1, .fingerprint = position_.fingerprint};
    there_ = false;
    return;
  }
  const int64_t taken = ++position_.step * options_.sequences.global_batch;
  while (anchors_.size() > 1 && anchors_[1].sequences <= taken) anchors_.pop_front();
  position_.stream = anchors_.front();
}

Batch StreamLoader::assemble(const std::vector<std::vector<Document>>& sequences,
                             const MicroRange& range) const {
  Batch batch;
  for (int64_t s = range.begin; s < range.end; ++s) {
    for (const Document& document : sequences[static_cast<size_t>(s)]) {
      append_document({{document.tokens, document.trained},
                       document.sample,
                       document.labels,
                       options_.sequences.virtual_tokens},
                      options_.sequences.scored, batch);
    }
  }
  batch.document_start.push_back(static_cast<int32_t>(batch.tokens()));
  return batch;
}

}  // namespace lm
