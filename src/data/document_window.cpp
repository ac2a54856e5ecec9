#include "data/document_window.h"

#include <utility>

#include "base/error.h"

namespace lm {
namespace {

// Window 0 has the permutation of a token file's epoch.
int64_t permutation_of(int64_t epoch, int64_t window) {
  LM_CHECK(epoch >= 0 && epoch < (int64_t{1} << 32) && window >= 0 && window < (int64_t{1} << 31),
           "number of a window");
  return epoch | (window << 32);
}

}  // namespace

DocumentWindow::DocumentWindow(DocumentReader& reader, int64_t size, bool shuffle, int64_t seed)
    : reader_(reader),
      size_(size),
      shuffle_(shuffle),
      seed_(seed),
      order_(0, seed, 0, ShufflePurpose::kEpoch) {
  LM_CHECK(size >= 1, "data.shuffle_window");
}

void DocumentWindow::read_ahead(int64_t most) {
  while (!ended_ && std::ssize(ahead_) < most) {
    if (ahead_.empty()) ahead_start_ = reader_.position();
    std::optional<Document> document = reader_.next();
    ended_ = !document;
    if (document) ahead_.push_back(std::move(*document));
  }
}

std::optional<Document> DocumentWindow::next() {
  if (taken_ == std::ssize(current_)) {
    read_ahead(size_);
    if (ahead_.empty()) return std::nullopt;
    current_ = std::exchange(ahead_, {});
    taken_ = 0;
    start_ = ahead_start_;
    share_begin_ = reader_.share(start_);
    share_end_ = reader_.share(reader_.position());
    order_ =
        Permutation(std::ssize(current_), seed_, permutation_of(epoch_, ++window_), ShufflePurpose::kEpoch);
  }
  const int64_t index = shuffle_ ? order_(taken_) : taken_;
  ++taken_;
  Document out = std::move(current_[static_cast<size_t>(index)]);
  read_ahead(size_ - (std::ssize(current_) - taken_));
  return out;
}

void DocumentWindow::seek(int64_t epoch, const DocumentPosition& start, int64_t window) {
  reader_.seek(start);
  epoch_ = epoch;
  current_.clear();
  ahead_.clear();
  taken_ = 0;
  share_begin_ = share_end_ = reader_.share(start);
  window_ = window - 1;
  ended_ = false;
}

double DocumentWindow::share() const {
  if (current_.empty()) return share_begin_;
  return share_begin_ + (share_end_ - share_begin_) * static_cast<double>(taken_) /
                            static_cast<double>(std::ssize(current_));
}

}  // namespace lm
