// Turns training files into a token file, once: the result lies in a cache under a key made of everything it
// depends on, and a second start finds it without running anything. Tokenising itself is a Python program
// (prepare/), started without a shell; it dies with this process, and its progress goes to the log.
// Called by one thread before training starts; blocks. Throws Error(11) for data, tokenizer or template that
// cannot be used, Error(10) for an interpreter that cannot be started, Error(75) when `stopped` says so.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/hub.h"
#include "data/packing.h"
#include "data/token_file.h"

namespace lm {

struct PrepareOptions {
  std::vector<std::string> files;  // names, globs, or names of data sets
  DataFormat format = DataFormat::kAuto;
  LossOn loss_on = LossOn::kCompletion;
  ColumnNames columns = {};
  std::string chat_template = {};  // a file; "" = the model's own
  Render render = Render::kAuto;
  BadRows bad_rows = BadRows::kStop;
  Answers answers = Answers::kAll;
  Reasoning reasoning = Reasoning::kKeep;
  std::string model_dir;    // holds tokenizer.json, tokenizer_config.json, chat_template.jinja
  std::string cache_dir;    // "" = ~/.cache/lmlaunch/tokens; made when missing
  std::string python;       // interpreter, by path or looked up in PATH
  std::string program_dir;  // the folder prepare/
  int workers = 1;          // processes
  int64_t vocab = 0;        // the model's: every id must be below it; 0: not asked
  std::string date = {};    // "2026-01-31": what a chat template is told that asks (template_date.h)
  DataCaches caches = {};
  std::function<bool()> stopped;  // asked about ten times per second while Python runs; may be empty
};

// What a token of one example adds to its text, and whether the model shall learn to write it.
struct SamplePiece {
  std::string text;
  bool trained = false;
};

struct Prepared {
  std::string path;  // of the token file
  bool from_cache = false;
  int64_t examples = 0, tokens = 0, trained_tokens = 0;
  int64_t dropped = 0;                     // examples in which nothing is trained
  std::vector<ExampleRange> text = {};     // of which the examples are plain text
  std::vector<ExampleRange> entries = {};  // the examples of each of PrepareOptions::files
  int64_t plain_pairs = 0;                 // rows of a plain prompt and completion
  bool has_template = false;               // the model's, or the one that was asked for
  // Of the conversations, where the model has none of its own or another was asked for: Jinja.
  std::string chat_template = {};
  std::vector<std::string> notes = {};   // what the user should know of the data
  std::vector<SamplePiece> sample = {};  // the first tokens of the first example
  int64_t sample_tokens = 0;             // all of it
};

Prepared prepare_tokens(const PrepareOptions& options);

// What prepare_tokens would find in `cache_dir`; nothing where it would have work to do, which includes data
// files that are large and were never hashed. Never throws for what the data are.
std::optional<Prepared> find_tokens(const PrepareOptions& options);

// For messages: the first few of PrepareOptions::files.
std::string names_of(const std::vector<std::string>& files);

}  // namespace lm
