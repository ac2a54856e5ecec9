// Exports a trained model as a Hugging Face directory: the base model's config.json in its original form, its
// tokenizer files unchanged, and weights borrowed from the caller, under the base's names. What nobody trains
// is copied, and tensors that the base has in another type than most keep it (export/base_files.h). The
// directory appears under its name only when complete. One thread; errors: 11 for the base model's files, 14
// when the output exists, 20/21 on writing.
#pragma once

#include <string>
#include <vector>

#include "export/weight_source.h"

namespace lm {

struct ExportOptions {
  DType dtype = DType::kBF16;  // or fp32: the files' type, but for tensors that the base's have in another
  int64_t part_bytes = kPartBytes;  // a larger model is written in parts
  bool replace = false;             // replace an existing directory, else refuse it
  bool fresh = false;               // the weights began as random ones: nothing is the base's but its files
  std::string chat_template = {};   // replaces the base model's; "": the base model's
  std::vector<std::string> unread = {};  // unread_modules (weights/loader.h), which stay the base's
  const ModelSpec* scores = nullptr;  // not null: a model with a head of scores, which config.json describes
};

void export_model(const std::string& output, const std::string& base_directory, const ModelLayout& layout,
                  const WeightSource& source, const ExportOptions& options);

// The hash of such a directory's weights (weights/verify.h), which is not written.
std::string export_hash(const std::string& base_directory, const ModelLayout& layout,
                        const WeightSource& source, const ExportOptions& options);

// What such a directory has, its towers included; they are there only when their base is.
std::vector<TensorInfo> exported_tensors(const std::string& base_directory, const ModelLayout& layout,
                                         const ExportOptions& options);

// Whether such a directory has tensors, names or types of its base's files.
bool takes_from_base(const std::string& base_directory, const ModelLayout& layout,
                     const ExportOptions& options);

// config.json's text for weights of `dtype`: unchanged if it has that dtype, else with its dtype keys
// changed, a wrapper's text model included.
std::string config_for_dtype(const std::string& text, DType dtype, const std::string& place);

// The same text for a model with a head of scores: its class, labels, problem and padding token.
std::string config_for_scores(const std::string& text, const ModelSpec& spec, const std::string& place);

// The bytes that copy_tokenizer_files will copy from there.
int64_t tokenizer_bytes(const std::string& from);

// Copies the files of the tokenizer, of processors and of generation; also used for LoRA's output.
void copy_tokenizer_files(const std::string& from, const std::string& to,
                          const std::string& chat_template = "");

}  // namespace lm
