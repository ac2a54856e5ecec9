// Batches of rows that are read, tokenized and packed as the run goes (data.streaming). The state that a
// checkpoint has is the position of a step, and an anchor: a window of documents from which all sequences
// that are not trained yet can be made again, and the room that packing had left there. Every rank reads all
// rows, since the sequences and targets of a step depend on all of them. Borrows the rows. One thread at a
// time. Throws what the rows throw, and Error(11) for data without training targets.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "data/batch_source.h"
#include "data/document_window.h"
#include "data/sequence_packer.h"

namespace lm {

struct StreamOptions {
  LoaderOptions sequences = {};  // without `text`, `weights` and `labels`, which come with the rows
  int64_t window = 10000;        // documents that are held and shuffled at a time
  int64_t fingerprint = 0;       // of the data
  bool reports = false;          // log what data.max_length did to the rows
};

class StreamLoader : public BatchSource {
 public:
  StreamLoader(RowStream& rows, const StreamOptions& options);
  StreamLoader(const StreamLoader&) = delete;
  StreamLoader& operator=(const StreamLoader&) = delete;

  StepBatches next() override;
  const LoaderPosition& position() const override { return position_; }
  void restore(const LoaderPosition& position) override;
  double epochs() override;

  // Documents in memory: in the window, and in sequences.
  int64_t held_in_window() const { return window_.held(); }
  int64_t held_in_sequences() const { return packer_.held(); }

 private:
  // Seeks the rows to position_'s anchor.
  void resume();
  // Reads until a step and the knowledge whether another follows are there.
  void fill();
  void add_anchor();
  // Moves the position behind a step.
  void advance();
  void report_once();
  Batch assemble(const std::vector<std::vector<Document>>& sequences, const MicroRange& range) const;

  const StreamOptions options_;
  DocumentReader reader_;
  DocumentWindow window_;
  SequencePacker packer_;
  bool ended_ = false;  // the epoch's rows are all in the packer
  bool whole_ = false;  // rows have been read since the epoch's beginning
  // Of the sequences that are not trained yet; the first needs no document before it.
  std::deque<StreamAnchor> anchors_;
  int64_t since_anchor_ = 0;  // documents
  LoaderPosition position_;
  bool there_ = false;  // the members above are at position_
  bool warned_ = false, reported_ = false;
};

}  // namespace lm
