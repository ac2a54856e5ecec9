#include "data/loader.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "data/shuffle.h"

namespace lm {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& place, const std::string& next) {
  throw Error(Exit::kInput, {.area = "DATA-24", .what = what, .place = place, .next = next});
}

// The number of `examples` held out for eval: the rounded fraction, but neither all nor none.
int64_t held_out(int64_t examples, double fraction) {
  if (fraction <= 0.0) return 0;
  const auto wanted = static_cast<int64_t>(std::llround(fraction * static_cast<double>(examples)));
  return std::min(std::max<int64_t>(wanted, 1), std::max<int64_t>(examples - 1, 0));
}

std::string percent(int64_t part, int64_t whole) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
  return text;
}

// No target at all is an error; very few only a warning, since they may be intended (one-word answers to long
// documents).
void check_targets(const std::string& place, const PieceCounts& counts) {
  if (counts.examples == 0)
    refuse("there is no training example", place, "look at data.train and data.eval_fraction");
  if (counts.targets == 0) {
    refuse(fmt::format("not one token is a training target in {} examples ({} without a target, {} longer "
                       "than data.max_length)",
                       counts.examples, counts.without_target, counts.too_long),
           place, "check the format of the data, data.loss_on, data.max_length and data.too_long");
  }
}

void warn_of_losses(const std::string& place, const PieceCounts& counts, int64_t max_length) {
  if (counts.targets * 100 < counts.tokens) {
    log_warning("DATA-24", "only " + percent(counts.targets, counts.tokens) + " of the tokens in " + place +
                               " are training targets; check the format of the data and data.loss_on");
  }
  if (counts.endless > 0) {
    log_warning("DATA-24",
                fmt::format("{} of {} examples in {} are cut at data.max_length {} before their last answer "
                            "ends, and lose {} trained tokens: from these the model does not learn to stop; "
                            "raise data.max_length, or leave them out with data.too_long = \"drop\"",
                            counts.endless, counts.examples, place, max_length, counts.lost_targets));
  }
}

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

Loader::Loader(const DataSource& train, const std::vector<EvalSource>& evals, const LoaderOptions& options)
    : train_(train),
      options_(options),
      fingerprint_(static_cast<int64_t>(train.fingerprint())),
      position_{.fingerprint = fingerprint_} {
  LM_CHECK(options.global_batch >= 1 && options.micro_batch >= 1, "batch sizes");
  LM_CHECK(options.micro_batch <= std::numeric_limits<int32_t>::max() / options.max_length,
           "a micro-batch counts its tokens in 32 bits");
  LM_CHECK(options.vocab >= 1, "vocabulary");
  LM_CHECK(options.world >= 1 && options.rank >= 0 && options.rank < options.world, "ranks");
  if (options_.name.empty()) options_.name = train.name();
  const auto labelled = [&](const DataSource& source, const std::vector<float>& labels) {
    return !options.scored || std::ssize(labels) == source.examples() * options.scored->labels;
  };
  LM_CHECK(labelled(train, options.labels) &&
               std::ranges::all_of(evals, [&](const EvalSource& e) { return labelled(*e.source, e.labels); }),
           "a label for each example");
  const int64_t examples = train.examples();
  const int64_t held = evals.empty() ? held_out(examples, options.eval_fraction) : 0;
  const Permutation draw(examples, options.seed, 0, ShufflePurpose::kHeldOut);
  pieces_ = pieces_of(
      train, [&](int64_t index) { return held == 0 || draw(index) >= held; }, options.text, train_counts_);
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
  Eval eval{.from = std::move(from)};
  if (eval.from.groups.empty()) {
    eval.pieces = pieces_of(*eval.from.source, takes, eval.from.text, eval.counts);
  } else {
    eval.pieces = ending_pieces(*eval.from.source, room(), eval.counts);
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

std::vector<Piece> Loader::pieces_of(const DataSource& source, const std::function<bool(int64_t)>& takes,
                                     std::span<const ExampleRange> text, PieceCounts& counts) const {
  if (!options_.scored) return cut_pieces(source, room(), options_.too_long, takes, counts, text);
  const bool drops = options_.scored->pairs || options_.too_long == TooLong::kDrop;
  return whole_pieces(source, room(), drops, takes, counts);
}

const std::vector<float>& Loader::labels_of(const DataSource& source) const {
  const auto eval = std::ranges::find_if(evals_, [&](const Eval& e) { return e.from.source == &source; });
  return &source == &train_ || eval == evals_.end() ? options_.labels : eval->from.labels;
}

const std::string& Loader::name_of(const DataSource& source) const {
  const auto eval = std::ranges::find_if(evals_, [&](const Eval& e) { return e.from.source == &source; });
  return &source == &train_ || eval == evals_.end() ? options_.name : eval->from.name;
}

std::string Loader::length_report() const {
  std::string out = "data: train: " + describe_counts(train_counts_, options_.max_length);
  for (const Eval& eval : evals_)
    out += "\ndata: eval" + (eval.from.set.empty() ? "" : " " + eval.from.set) + ": " +
           describe_counts(eval.counts, options_.max_length);
  return out;
}

const SequenceList& Loader::sequences_of(int64_t epoch) {
  if (planned_ == epoch) return plan_;
  const Permutation order(pieces_in_epoch(), options_.seed, epoch, ShufflePurpose::kEpoch);
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

StepBatches Loader::next() {
  auto& [epoch, step, fingerprint] = position_;
  if (fingerprint != fingerprint_) {
    refuse(
        "the tokenized dataset differs from the one this run started with: the data, the tokenizer or the "
        "chat template "
        "has changed",
        options_.name,
        "restore the files of data.train and the tokenizer's files in model.path, or start in another "
        "run.dir");
  }
  if (epoch < 0 || step < 0 || step >= steps_in_epoch(epoch)) {
    throw Error(Exit::kIncompatible, {.area = "CKPT-26",
                                      .what = "the saved data position is outside the epoch",
                                      .place = fmt::format("epoch {} step {}", epoch, step),
                                      .next = "resume with the batch size and data options of the run"});
  }
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
  const int64_t begin = first + count * options_.rank / options_.world;
  const int64_t end = first + count * (options_.rank + 1) / options_.world;
  for (int64_t s = begin; s < end; s += options_.micro_batch) {
    batches.micro.push_back(assemble(train_, pieces_, list, s, std::min(end, s + options_.micro_batch)));
  }
  // All ranks run as many micro-batches as the one with the most, since collectives must match: missing ones
  // are filled with sequences without targets.
  const int64_t most = ceil_div(ceil_div(count, options_.world), options_.micro_batch);
  while (std::ssize(batches.micro) < most) {
    batches.micro.push_back(assemble(train_, pieces_, list, first, first + 1));
    std::ranges::fill(batches.micro.back().target, -1);
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
  const auto n = static_cast<size_t>(piece.length), at = batch.token.size();
  // As unsigned numbers, so that a negative id is too large, too.
  uint32_t largest = 0;
  for (const int32_t id : view.tokens) largest = std::max(largest, static_cast<uint32_t>(id));
  if (largest >= static_cast<uint64_t>(options_.vocab)) {
    const auto bad = std::ranges::find_if(view.tokens, [&](int32_t id) {
      return static_cast<uint32_t>(id) >= static_cast<uint64_t>(options_.vocab);
    });
    const int64_t position = source.first_token(piece.example) + piece.begin + (bad - view.tokens.begin());
    refuse(
        fmt::format("token {} = {} is outside the model's vocabulary of {}", position, *bad, options_.vocab),
        name_of(source), "use the tokenizer that belongs to model.path");
  }
  batch.document_start.push_back(static_cast<int32_t>(at));
  // Any token will do for the virtual ones.
  const auto before = static_cast<size_t>(options_.virtual_tokens), first = at + before;
  batch.token.insert(batch.token.end(), before, view.tokens.front());
  batch.token.insert(batch.token.end(), view.tokens.begin(), view.tokens.end());
  batch.sample.insert(batch.sample.end(), before + n, piece.example);
  batch.position.resize(first + n);
  std::iota(batch.position.begin() + static_cast<std::ptrdiff_t>(at), batch.position.end(), 0);
  batch.target.resize(first + n, -1);
  for (size_t i = 0; i < n; ++i)
    batch.target[first + i] = i + 1 < n && view.trained[i + 1] != 0 ? view.tokens[i + 1] : -1;
  if (!options_.scored) return;
  LM_CHECK(before == 0, "a scored text has no virtual tokens");
  part_scored(view, at, options_.scored->pad_token, batch);
  const auto label = labels_of(source).begin() + piece.example * options_.scored->labels;
  batch.label.insert(batch.label.end(), label, label + options_.scored->labels);
}

}  // namespace lm
