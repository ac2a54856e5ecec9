// Rows of the user's files, tokenized by a Python program (prepare/stream.py) while the run trains. The
// program works one chunk ahead, keeps nothing on a disk, and is killed with this process. One thread;
// blocks. Throws Error(11) for rows, a tokenizer or a template that cannot be used, Error(10) for an
// interpreter that cannot be started, Error(75) if the program does not answer after a stop request
// (python.h).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "data/prepare.h"
#include "data/python.h"
#include "data/row_stream.h"

namespace lm {

class PythonRows : public RowStream {
 public:
  // `says`: log notes on the data.
  PythonRows(const PrepareOptions& options, bool says);

  // What the first rows of the files tell.
  const Prepared& first_rows() const { return first_rows_; }
  // Same content, same value (stream_key), as far as the ends of the files tell.
  int64_t fingerprint() const { return fingerprint_; }

  void seek(const RowPosition& position) override;
  std::optional<RowChunk> next() override;
  int64_t total_bytes() const override { return total_bytes_; }

 private:
  void note(const nlohmann::json& answer) const;

  PythonSession session_;
  const bool says_;
  Prepared first_rows_;
  int64_t fingerprint_ = 0, total_bytes_ = 0;
};

}  // namespace lm
