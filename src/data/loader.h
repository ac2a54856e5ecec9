// Produces the batches of one optimizer step after another: shuffled, packed or padding-free, with the step's
// number of targets known before it starts. The only state is (epoch, step in epoch): restoring it continues
// exactly, since everything else follows from the seed and the data. Called by one thread at a time (in
// training prefetch.h's); the sources are borrowed and must outlive it. Throws Error(11) for data without
// training targets, ids outside the vocabulary, and data that differs from that of the restored state.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/batch.h"
#include "config/config.h"
#include "data/batch_source.h"
#include "data/batching.h"
#include "data/choices.h"
#include "data/packing.h"
#include "data/source.h"

namespace lm {

// An evaluation set from its own file.
struct EvalSource {
  const DataSource* source = nullptr;
  std::string set = {};                  // its name if there are several; "": unnamed
  std::string name = {};                 // for messages: the user's files; "": the source's name
  std::vector<ExampleRange> text = {};   // examples that are plain text
  std::vector<ChoiceGroup> groups = {};  // of the examples, where they are endings of rows of choices
  std::vector<float> labels = {};        // of scored examples
};

struct LoaderOptions {
  int64_t seed = 42;
  int64_t max_length = 2048;  // tokens per sequence
  // Of these, that stand before each document: rows of a batch whose tokens mean nothing.
  int64_t virtual_tokens = 0;
  TooLong too_long = TooLong::kAuto;
  bool packing = false;
  int64_t global_batch = 8;  // sequences per step, over all ranks
  int64_t micro_batch = 1;   // sequences per micro-batch
  int64_t vocab = 0;         // the model's: every id must be below it
  bool shuffle = true;       // false: every epoch has the order of the source
  double eval_fraction =
      0.0;  // fraction of the training examples held out for eval; used without an eval source
  std::vector<ExampleRange> text = {};  // training examples that are plain text
  // Ranges of the training examples, in order, and how often the examples of each occur in an epoch; empty:
  // once. A fractional weight selects a different part in each epoch.
  std::vector<std::pair<ExampleRange, double>> weights = {};
  std::optional<ScoredData> scored = {};
  std::vector<float> labels = {};  // of scored training examples
  std::string name = {};           // for messages: the user's files; "": the source's name
  int rank = 0, world = 1;  // a step's sequences are divided among the ranks as equal, contiguous ranges

  int64_t room() const { return max_length - virtual_tokens; }  // of a document
};

// Sums over the sequences of an epoch, virtual tokens included.
struct EpochCounts {
  int64_t sequences = 0, tokens = 0, targets = 0;
  double squares = 0;  // of the documents' numbers of tokens
};

// An evaluation set, in file order: micro_batch sequences each.
struct EvalBatches {
  std::string set;  // its name; ""
  std::vector<Batch> batches;
  std::vector<ChoiceGroup> groups = {};  // of its examples (Batch::sample); empty: no rows of choices
};

// The documents of the examples that `takes` accepts, in the order of the source. `text`, ascending, are its
// plain-text ones.
std::vector<Piece> pieces_of(const DataSource& source, const LoaderOptions& options,
                             const std::function<bool(int64_t)>& takes, std::span<const ExampleRange> text,
                             PieceCounts& counts);

class Loader : public BatchSource {
 public:
  Loader(const DataSource& train, const std::vector<EvalSource>& evals, const LoaderOptions& options);
  // `eval` may be null.
  Loader(const DataSource& train, const DataSource* eval, const LoaderOptions& options)
      : Loader(train, eval == nullptr ? std::vector<EvalSource>() : std::vector<EvalSource>{{.source = eval}},
               options) {}

  // Evaluation sets alone: there are no steps.
  Loader(const std::vector<EvalSource>& evals, const LoaderOptions& options);

  StepBatches next() override;

  // The steps of the first epoch; with packing, epochs may differ by a few sequences.
  int64_t steps_per_epoch() { return steps_in_epoch(0); }
  int64_t steps_in_epoch(int64_t epoch);
  int64_t sequences_in_epoch(int64_t epoch);
  EpochCounts counts_of(int64_t epoch);
  // Whole epochs plus a fraction of the next, rounded up.
  int64_t total_steps(double epochs);

  // The evaluation sets, never shuffled: those given, or one held out of the training examples. Empty without
  // eval data.
  std::vector<EvalBatches> eval_sets() const;
  bool has_eval() const { return !evals_.empty(); }

  // The effect of data.max_length on the rows of the training set and of each evaluation set: one line each.
  std::string length_report() const;
  const LoaderPosition& position() const override { return position_; }
  void restore(const LoaderPosition& position) override { position_ = position; }
  double epochs() override;

 private:
  // An evaluation set, from the training source or from its own.
  struct Eval {
    EvalSource from;
    std::vector<Piece> pieces = {};
    PieceCounts counts = {};
  };

  Loader(const DataSource* train, const LoaderOptions& options);
  void add_eval(EvalSource from, const std::function<bool(int64_t)>& takes);
  const std::string& name_of(const DataSource& source) const;
  const SequenceList& sequences_of(int64_t epoch);
  // The pieces of a weighted epoch, in the order of the file. Every epoch has the same number.
  std::vector<int32_t> weighted_pieces(int64_t epoch) const;
  int64_t pieces_in_epoch() const;
  Batch assemble(const DataSource& source, const std::vector<Piece>& pieces, const SequenceList& list,
                 int64_t begin, int64_t end) const;
  void append(const DataSource& source, const Piece& piece, Batch& batch) const;
  const std::vector<float>& labels_of(const DataSource& source) const;

  const DataSource* train_;  // null: evaluation sets alone
  LoaderOptions options_;    // with a name
  std::vector<Piece> pieces_;
  PieceCounts train_counts_;
  std::vector<Eval> evals_;
  SequenceList plan_;  // of epoch planned_
  int64_t planned_ = -1;
  std::map<int64_t, int64_t> steps_;  // per epoch, cached
  mutable ExampleBuffer buffer_;
  const int64_t fingerprint_;  // of train_

  LoaderPosition position_;
};

}  // namespace lm
