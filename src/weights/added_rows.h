// The rows of a vocabulary matrix that new tokens have, beside the files of a model without them: the file
// added_rows.safetensors (weights/model_files.h), in the types of the model's own tensors. Values; one
// thread.
#pragma once

#include <cstdint>
#include <string>

#include "spec/model_spec.h"
#include "weights/model_files.h"

namespace lm {

// Tokens in `first` .. `end` - 1 are new. Rows from `end` on, if the matrix had more than it had tokens,
// stay.
struct AddedRows {
  int64_t first = 0, end = 0;
  int64_t rows = 0;   // of the matrix with them
  int64_t like = -1;  // the token whose row each of them begins with; -1: the mean of all rows before them
};

// Writes the file for the embedding of `base`, and for a head of its own. Reads each matrix once at most.
void write_added_rows(const ModelFiles& base, const ModelSpec& spec, const AddedRows& added,
                      const std::string& path);

// The same with the values of an adapter's file, which has copies of the matrices with `added.rows` rows
// (weights/base_copies.h). A matrix without a copy there keeps its own rows, and gets the others by
// write_added_rows's rule.
void copy_added_rows(const ModelFiles& base, const ModelFiles& adapter, const ModelSpec& spec,
                     const AddedRows& added, const std::string& path);

// The matrices' rows in an adapter's file; 0: it has no copy of one.
int64_t rows_of_copies(const ModelFiles& adapter, const ModelSpec& spec);

}  // namespace lm
