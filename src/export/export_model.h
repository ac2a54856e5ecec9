// A trained model as a Hugging Face directory: the base model's config.json in the form in which it was read,
// its tokenizer files untouched, and weights out of memory that the caller lends. The directory appears under
// its name only when complete. One thread; errors: 11 for the base model's files, 14 when the output exists,
// 20/21 on writing.
#pragma once

#include <string>

#include "export/weight_source.h"

namespace lm {

struct ExportOptions {
  DType dtype = DType::kBF16;       // or fp32: of the files
  int64_t part_bytes = kPartBytes;  // a larger model is written in parts
  bool replace = false;             // an existing directory is exchanged, else refused
  std::string chat_template = {};   // in place of the base model's; "": that one
};

void export_model(const std::string& output, const std::string& base_directory, const ModelLayout& layout,
                  const WeightSource& source, const ExportOptions& options);

// config.json's text for weights of `dtype`: untouched when it says so already, else with its dtype key
// changed.
std::string config_for_dtype(const std::string& text, DType dtype, const std::string& place);

// What copy_tokenizer_files will copy from there.
int64_t tokenizer_bytes(const std::string& from);

// Copies what belongs to the tokenizer and to generation; used for LoRA's output as well.
void copy_tokenizer_files(const std::string& from, const std::string& to,
                          const std::string& chat_template = "");

}  // namespace lm
