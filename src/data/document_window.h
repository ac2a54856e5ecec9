// Shuffles streamed documents within a window: as many as it holds are read, and leave it in the order of a
// permutation; while they leave, the next window is read into their places. So there are never more than a
// window's documents in memory, and a window of all documents has the order of a token file's epoch. One
// thread; borrows the reader. Throws what the reader throws.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "data/document_reader.h"
#include "data/shuffle.h"

namespace lm {

class DocumentWindow {
 public:
  // `size` documents; without `shuffle` they leave in the order of their rows.
  DocumentWindow(DocumentReader& reader, int64_t size, bool shuffle, int64_t seed);

  // The next document; unset: the epoch ends.
  std::optional<Document> next();
  // Resumes at the first document of window `window` of the epoch.
  void seek(int64_t epoch, const DocumentPosition& start, int64_t window);

  // The document that next() has returned is the first of its window; its first row's place, and its number.
  bool begun() const { return taken_ == 1; }
  const DocumentPosition& start() const { return start_; }
  int64_t window() const { return window_; }
  // Share of the files' bytes that the documents which have left stand for.
  double share() const;
  int64_t held() const { return std::ssize(current_) - taken_ + std::ssize(ahead_); }

 private:
  // Reads until the next window has `most` documents.
  void read_ahead(int64_t most);

  DocumentReader& reader_;
  const int64_t size_;
  const bool shuffle_;
  const int64_t seed_;
  int64_t epoch_ = 0;
  std::vector<Document> current_;  // in the order of the rows; those that have left are empty
  Permutation order_;              // of current_
  int64_t taken_ = 0;              // of current_
  DocumentPosition start_;         // of current_
  double share_begin_ = 0, share_end_ = 0;
  int64_t window_ = -1;          // number of current_
  std::vector<Document> ahead_;  // of the next window
  DocumentPosition ahead_start_;
  bool ended_ = false;  // no rows are left
};

}  // namespace lm
