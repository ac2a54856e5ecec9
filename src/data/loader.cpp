#include "data/loader.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/bytes.h"
#include "base/error.h"
#include "data/piece_checks.h"
#include "data/shuffle.h"

namespace lm {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& place, const std::string& next) {
  throw Error(Exit::kInput, {.area = "DATA-24", .what = what, .place = place, .next = next});
}

// The number of `examples` held out for eval: the rounded fraction, but neither all nor none.
int64_t eval_examples(int64_t examples, double fraction) {
  if (fraction <= 0.0) return 0;
  const auto wanted = static_cast<int64_t>(std::llround(fraction * static_cast<double>(examples)));
  return std::min(std::max<int64_t>(wanted, 1), std::max<int64_t>(examples - 1, 0));
}

}  // namespace

Loader::Loader(const DataSource* train, const LoaderOptions& options)
    : train_(train),
      options_(options),
      fingerprint_(train == nullptr ? 0 : static_cast<int64_t>(train->fingerprint())),
      position_{.fingerprint = fingerprint_} {
  LM_CHECK(options.global_batch >= 1 && options.micro_batch >= 1, "batch sizes");
  LM_CHECK(options.micro_batch <= std::numeric_limits<int32_t>::max() / options.max_length,
           "a micro-batch counts its tokens in 32 bits");
  LM_CHECK(options.vocab >= 1, "vocabulary");
  LM_CHECK(options.world >= 1 && options.rank >= 0 && options.rank < options.world, "ranks");
  if (options_.name.empty() && train != nullptr) options_.name = train->name();
}

Loader::Loader(const std::vector<EvalSource>& evals, const LoaderOptions& options)
    : Loader(static_cast<const DataSource*>(nullptr), options) {
  for (const EvalSource& from : evals) add_eval(from, [](int64_t) { return true; });
}

Loader::Loader(const DataSource& train, const std::vector<EvalSource>& evals, const LoaderOptions& options)
    : Loader(&train, options) {
  LM_CHECK(!options.scored || std::ssize(options.labels) == train.examples() * options.scored->labels,
           "a label for each example");
  const int64_t examples = train.examples();
  const int64_t held = evals.empty() ? eval_examples(examples, options.eval_fraction) : 0;
  const Permutation draw(examples, options.seed, 0, ShufflePurpose::kEvalSplit);
  pieces_ = pieces_of(
      train, options_, [&](int64_t index) { return held == 0 || draw(index) >= held; }, options.text,
      train_counts_);
  check_targets(options_.name, train_counts_);
  if (!options.scored) warn_of_losses(options_.name, train_counts_, options.max_length);
  if (pieces_in_epoch() == 0)
    refuse("data.weights leave not one example for an epoch", options_.name, "raise them");
  for (const EvalSource& from : evals) add_eval(from, [](int64_t) { return true; });
  if (held > 0)
    add_eval({.source = &train, .name = options_.name, .text = options.text},
             [&](int64_t index) { return draw(index) < held; });
}

void Loader::add_eval(EvalSource from, const std::function<bool(int64_t)>& takes) {
  if (from.name.empty()) from.name = from.source->name();
  LM_CHECK(from.source == train_ || !options_.scored ||
               std::ssize(from.labels) == from.source->examples() * options_.scored->labels,
           "a label for each example");
  Eval eval{.from = std::move(from)};
  if (eval.from.groups.empty()) {
    eval.pieces = pieces_of(*eval.from.source, options_, takes, eval.from.text, eval.counts);
  } else {
    eval.pieces = ending_pieces(*eval.from.source, options_.room(), eval.counts);
    if (eval.counts.endless > 0) {
      refuse(fmt::format("{} of {} endings are longer than data.max_length {} allows", eval.counts.endless,
                         eval.counts.examples, options_.max_length),
             eval.from.name, "raise data.max_length, or remove their rows");
    }
  }
  check_targets(eval.from.name, eval.counts);
  // For eval data held out of the training examples the warning is logged only once.
  if (eval.from.name != options_.name && !options_.scored)
    warn_of_losses(eval.from.name, eval.counts, options_.max_length);
  evals_.push_back(std::move(eval));
}

std::vector<Piece> pieces_of(const DataSource& source, const LoaderOptions& options,
                             const std::function<bool(int64_t)>& takes, std::span<const ExampleRange> text,
                             PieceCounts& counts) {
  if (!options.scored) return cut_pieces(source, options.room(), options.too_long, takes, counts, text);
  const bool drops = options.scored->pairs || options.too_long == TooLong::kDrop;
  return whole_pieces(source, options.room(), drops, takes, counts);
}

const std::vector<float>& Loader::labels_of(const DataSource& source) const {
  const auto eval = std::ranges::find_if(evals_, [&](const Eval& e) { return e.from.source == &source; });
  return &source == train_ || eval == evals_.end() ? options_.labels : eval->from.labels;
}

const std::string& Loader::name_of(const DataSource& source) const {
  const auto eval = std::ranges::find_if(evals_, [&](const Eval& e) { return e.from.source == &source; });
  return &source == train_ || eval == evals_.end() ? options_.name : eval->from.name;
}

std::string Loader::length_report() const {
  std::string out;
  if (train_ != nullptr) out = "data: train: " + describe_counts(train_counts_, options_.max_length);
  for (const Eval& eval : evals_)
    out += std::string(out.empty() ? "" : "\n") + "data: eval" +
           (eval.from.set.empty() ? "" : " " + eval.from.set) + ": " +
           describe_counts(eval.counts, options_.max_length);
  return out;
}

const SequenceList& Loader::sequences_of(int64_t epoch) {
  if (planned_ == epoch) return plan_;
  const Permutation shuffled(pieces_in_epoch(), options_.seed, epoch, ShufflePurpose::kEpoch);
  const auto order = [&](int64_t i) { return options_.shuffle ? shuffled(i) : i; };
  if (options_.weights.empty()) {
    plan_ =
        pack_sequences(pieces_, order, options_.packing, options_.max_length, -1, options_.virtual_tokens);
  } else {
    const std::vector<int32_t> weighted = weighted_pieces(epoch);
    plan_ = pack_sequences(
        pieces_, [&](int64_t i) { return weighted[static_cast<size_t>(order(i))]; }, options_.packing,
        options_.max_length, std::ssize(weighted), options_.virtual_tokens);
  }
  planned_ = epoch;
  return plan_;
}

namespace {

// The number of pieces, out of `count` with this weight, that occur once more than the others.
int64_t once_more(int64_t count, double weight) {
  return std::llround((weight - std::floor(weight)) * static_cast<double>(count));
}

}  // namespace

int64_t Loader::pieces_in_epoch() const {
  if (options_.weights.empty()) return std::ssize(pieces_);
  int64_t all = 0;
  for (const auto& [range, weight] : options_.weights) {
    const int64_t count = std::ranges::count_if(
        pieces_, [&](const Piece& p) { return p.example >= range.begin && p.example < range.end; });
    all += static_cast<int64_t>(std::floor(weight)) * count + once_more(count, weight);
  }
  return all;
}

std::vector<int32_t> Loader::weighted_pieces(int64_t epoch) const {
  std::vector<int32_t> out;
  for (const auto& [range, weight] : options_.weights) {
    std::vector<int32_t> here;
    for (int64_t i = 0; i < std::ssize(pieces_); ++i) {
      const Piece& piece = pieces_[static_cast<size_t>(i)];
      if (piece.example >= range.begin && piece.example < range.end) here.push_back(static_cast<int32_t>(i));
    }
    const auto times = static_cast<int64_t>(std::floor(weight));
    const int64_t more = once_more(std::ssize(here), weight);
    const Permutation draw(std::ssize(here), options_.seed, epoch, ShufflePurpose::kWeights);
    for (int64_t i = 0; i < std::ssize(here); ++i) {
      const int64_t copies = times + (draw(i) < more ? 1 : 0);
      out.insert(out.end(), static_cast<size_t>(copies), here[static_cast<size_t>(i)]);
    }
  }
  return out;
}

EpochCounts Loader::counts_of(int64_t epoch) {
  const SequenceList& list = sequences_of(epoch);
  EpochCounts counts{.sequences = list.sequences()};
  for (const int32_t index : list.order) {
    const Piece& piece = pieces_[static_cast<size_t>(index)];
    const int64_t length = piece.length + options_.virtual_tokens;
    counts.tokens += length;
    counts.targets += piece.targets;
    counts.squares += static_cast<double>(length) * static_cast<double>(length);
  }
  return counts;
}

int64_t Loader::sequences_in_epoch(int64_t epoch) {
  return options_.packing ? sequences_of(epoch).sequences() : pieces_in_epoch();
}

int64_t Loader::steps_in_epoch(int64_t epoch) {
  LM_CHECK(epoch >= 0, "epoch");
  if (!options_.packing) epoch = 0;  // every epoch has the same number of sequences
  if (const auto known = steps_.find(epoch); known != steps_.end()) return known->second;
  return steps_[epoch] = ceil_div(sequences_in_epoch(epoch), options_.global_batch);
}

int64_t Loader::total_steps(double epochs) {
  LM_CHECK(epochs > 0.0 && std::isfinite(epochs), "train.epochs");
  const double whole = std::floor(epochs);
  const auto full = static_cast<int64_t>(whole);
  int64_t steps = 0;
  if (!options_.packing) {
    steps = full * steps_per_epoch();
  } else {
    for (int64_t epoch = 0; epoch < full; ++epoch) steps += steps_in_epoch(epoch);
  }
  if (epochs > whole)
    steps += static_cast<int64_t>(std::ceil((epochs - whole) * static_cast<double>(steps_in_epoch(full))));
  return steps;
}

double Loader::epochs() {
  const auto whole = static_cast<double>(position_.epoch);
  if (position_.step == 0) return whole;
  return whole + static_cast<double>(position_.step) / static_cast<double>(steps_in_epoch(position_.epoch));
}

StepBatches Loader::next() {
  LM_CHECK(train_ != nullptr, "training data");
  int64_t &epoch = position_.epoch, &step = position_.step;
  check_fingerprint(position_, fingerprint_, options_.name);
  if (epoch < 0 || step < 0 || step >= steps_in_epoch(epoch)) refuse_position(position_);
  const SequenceList& list = sequences_of(epoch);
  const int64_t first = step * options_.global_batch;
  const int64_t count = std::min(options_.global_batch, list.sequences() - first);
  StepBatches batches;
  for (int64_t s = first; s < first + count; ++s) {
    for (const int32_t piece : list.sequence(s)) {
      batches.target_tokens += pieces_[static_cast<size_t>(piece)].targets;
      batches.tokens += pieces_[static_cast<size_t>(piece)].length;
    }
  }
  for (const MicroRange& micro : micro_ranges(count, options_.micro_batch, options_.rank, options_.world)) {
    batches.micro.push_back(assemble(*train_, pieces_, list, first + micro.begin, first + micro.end));
    if (micro.filler) std::ranges::fill(batches.micro.back().target, -1);
  }
  if (++step == steps_in_epoch(epoch)) {
    ++epoch;
    step = 0;
  }
  return batches;
}

std::vector<EvalBatches> Loader::eval_sets() const {
  std::vector<EvalBatches> sets;
  for (const Eval& eval : evals_) {
    const SequenceList list = pack_sequences(
        eval.pieces, [](int64_t i) { return i; }, options_.packing, options_.max_length, -1,
        options_.virtual_tokens);
    EvalBatches& out =
        sets.emplace_back(EvalBatches{.set = eval.from.set, .batches = {}, .groups = eval.from.groups});
    for (int64_t s = 0; s < list.sequences(); s += options_.micro_batch) {
      out.batches.push_back(assemble(*eval.from.source, eval.pieces, list, s,
                                     std::min(list.sequences(), s + options_.micro_batch)));
    }
  }
  return sets;
}

Batch Loader::assemble(const DataSource& source, const std::vector<Piece>& pieces, const SequenceList& list,
                       int64_t begin, int64_t end) const {
  Batch batch;
  size_t tokens = 0;
  for (int64_t s = begin; s < end; ++s) {
    for (const int32_t piece : list.sequence(s))
      tokens += static_cast<size_t>(pieces[static_cast<size_t>(piece)].length + options_.virtual_tokens);
  }
  for (auto* column : {&batch.token, &batch.position, &batch.target, &batch.sample}) column->reserve(tokens);
  for (int64_t s = begin; s < end; ++s) {
    for (const int32_t piece : list.sequence(s)) append(source, pieces[static_cast<size_t>(piece)], batch);
  }
  batch.document_start.push_back(static_cast<int32_t>(batch.tokens()));
  return batch;
}

void Loader::append(const DataSource& source, const Piece& piece, Batch& batch) const {
  const ExampleView view = source.example(piece.example, piece.begin, piece.length, buffer_);
  if (const int64_t bad = first_foreign(view.tokens, options_.vocab); bad >= 0) {
    refuse_token(source.first_token(piece.example) + piece.begin + bad, view.tokens[static_cast<size_t>(bad)],
                 options_.vocab, name_of(source));
  }
  std::span<const float> labels;
  if (options_.scored)
    labels = std::span(labels_of(source))
                 .subspan(static_cast<size_t>(piece.example * options_.scored->labels),
                          static_cast<size_t>(options_.scored->labels));
  append_document({view, piece.example, labels, options_.virtual_tokens}, options_.scored, batch);
}

}  // namespace lm
