// Packs documents that arrive one by one into sequences, as pack_sequences does with all of an epoch: the
// same sequences in the same order. One that no further document can join is complete. Owns what it holds: at
// most kOpenSequences, and those that nobody has taken yet. One thread.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "data/document_reader.h"

namespace lm {

class SequencePacker {
 public:
  // `before`: tokens of a sequence that stand before each document.
  SequencePacker(bool packing, int64_t max_length, int64_t before = 0);

  void add(Document document);
  void finish() { finished_ = true; }  // the epoch ends: every sequence is complete
  int64_t ready() const;               // complete ones, to be taken
  std::vector<Document> take();        // the oldest

  // What decides about further documents: how many sequences were begun, and the room in the newest of them.
  int64_t begun() const { return begun_; }
  std::vector<int64_t> room() const { return {room_.begin(), room_.end()}; }
  // As after `begun` sequences, of which the newest have this `room`. The first `taken` sequences of the
  // epoch, which may be more, have been taken: their documents are dropped.
  void resume(int64_t begun, const std::vector<int64_t>& room, int64_t taken);
  int64_t held() const;  // documents

 private:
  const bool packing_;
  const int64_t max_length_, before_;
  int64_t begun_ = 0, taken_ = 0;
  bool finished_ = false;
  std::deque<int64_t> room_;                     // of the kOpenSequences newest; empty without packing
  std::deque<std::vector<Document>> sequences_;  // from taken_ on
};

}  // namespace lm
