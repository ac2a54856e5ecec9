#include "data/sequence_packer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace lm {

SequencePacker::SequencePacker(bool packing, int64_t max_length, int64_t before)
    : packing_(packing), max_length_(max_length), before_(before) {}

void SequencePacker::add(Document document) {
  const int64_t length = std::ssize(document.tokens) + before_;
  LM_CHECK(length <= max_length_ && !finished_, "a document that joins a sequence");
  const auto fits = std::ranges::find_if(room_, [&](int64_t room) { return room >= length; });
  int64_t home = begun_ - std::ssize(room_) + (fits - room_.begin());
  if (fits != room_.end()) {
    *fits -= length;
  } else {
    home = begun_++;
    if (packing_) room_.push_back(max_length_ - length);
    if (std::ssize(room_) > kOpenSequences) room_.pop_front();
    if (home >= taken_) sequences_.emplace_back();
  }
  if (home >= taken_) sequences_[static_cast<size_t>(home - taken_)].push_back(std::move(document));
}

int64_t SequencePacker::ready() const {
  const int64_t open = finished_ || !packing_ ? 0 : std::ssize(room_);
  return std::max<int64_t>(0, begun_ - open - taken_);
}

std::vector<Document> SequencePacker::take() {
  LM_CHECK(ready() > 0, "a complete sequence");
  std::vector<Document> out = std::move(sequences_.front());
  sequences_.pop_front();
  ++taken_;
  return out;
}

void SequencePacker::resume(int64_t begun, const std::vector<int64_t>& room, int64_t taken) {
  LM_CHECK(begun <= taken, "sequences that were begun before are not needed");
  begun_ = begun;
  taken_ = taken;
  finished_ = false;
  room_.assign(room.begin(), room.end());
  sequences_.clear();
}

int64_t SequencePacker::held() const {
  int64_t documents = 0;
  for (const std::vector<Document>& sequence : sequences_) documents += std::ssize(sequence);
  return documents;
}

}  // namespace lm
