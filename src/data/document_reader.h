// Streamed rows as documents: each chunk of rows is cut as examples of a token file are (packing.h), and only
// the current chunk is in memory. One thread; borrows the rows. Throws what they throw.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "data/loader.h"
#include "data/packing.h"
#include "data/row_stream.h"

namespace lm {

// A document of the model's input, and what a batch needs of its example.
struct Document {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> trained;
  std::vector<float> labels = {};
  int32_t sample = 0;  // number of the example in its epoch
  int32_t targets = 0;
};

// The place of a document: some documents of a chunk come before it.
struct DocumentPosition {
  RowPosition rows = {};  // where the chunk begins
  int64_t skip = 0;
  int64_t examples = 0;  // of the epoch, before the chunk
};

class DocumentReader {
 public:
  DocumentReader(RowStream& rows, const LoaderOptions& options);

  // The next document; unset: the epoch ends.
  std::optional<Document> next();
  DocumentPosition position() const;  // of the document that next() returns
  // Counts begin again. Throws Error(14) if the chunk there has fewer documents than `skip`.
  void seek(const DocumentPosition& position);

  const PieceCounts& counts() const { return counts_; }
  double share(const DocumentPosition& position) const;  // of the bytes of the files

 private:
  bool read_chunk();

  RowStream& rows_;
  const LoaderOptions& options_;
  RowChunk chunk_;
  std::vector<int64_t> first_;  // token of each example of the chunk
  std::vector<Piece> pieces_;   // its documents
  size_t next_ = 0;             // of them
  DocumentPosition begin_;      // of the chunk
  PieceCounts counts_;
};

}  // namespace lm
