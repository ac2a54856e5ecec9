// Tokenizes training files into a token file, once: the result is cached under a key of everything it depends
// on, and a second start finds it without running anything. Tokenisation is done by a Python program
// (prepare/), started without a shell; it is killed with this process, and its progress goes to the log.
// Called by one thread before training starts; blocks. Throws Error(11) for data, tokenizer or template that
// cannot be used, Error(10) for an interpreter that cannot be started, Error(75) if `stopped` returns true.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/choices.h"
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
  int64_t max_rows = 0;  // the first of all files; 0: all. Evaluation sets ignore it
  Answers answers = Answers::kAll;
  Reasoning reasoning = Reasoning::kKeep;
  // Of texts that are scored as a whole: train.objective, and with classify the labels' names and
  // train.problem, "auto" resolved.
  ObjectiveChoice objective = ObjectiveChoice::kSft;
  std::vector<std::string> labels = {};
  LabelProblem problem = LabelProblem::kAuto;
  bool score = false;       // every ending of rows of choices: prepare_evaluation sets it
  std::string model_dir;    // has tokenizer.json, tokenizer_config.json, chat_template.jinja
  std::string cache_dir;    // "" = ~/.cache/lmlaunch/tokens; created if missing
  std::string python;       // interpreter, by path or looked up in PATH
  std::string program_dir;  // the folder prepare/
  int workers = 1;          // processes
  int64_t vocab = 0;        // the model's: every id must be below it; 0: unchecked
  std::string date = {};    // "2026-01-31": today's date for chat templates (template_date.h)
  DataCaches caches = {};
  std::function<bool()> stopped;  // polled about ten times per second while Python runs; may be empty
};

// The text of one token of an example, and whether it is a training target.
struct SamplePiece {
  std::string text;
  bool trained = false;
};

struct Prepared {
  std::string path;  // of the token file; of streamed rows a key of their files
  bool from_cache = false;
  bool streamed = false;  // nothing is on a disk, and the numbers are of the first rows
  int64_t examples = 0, tokens = 0, trained_tokens = 0;
  int64_t dropped = 0;                     // examples without a target
  std::vector<ExampleRange> text = {};     // ranges of plain-text examples
  std::vector<ExampleRange> entries = {};  // per entry of PrepareOptions::files its examples
  int64_t plain_pairs = 0;                 // rows of a plain prompt and completion
  int64_t choice_rows = 0;                 // rows of choices, of which the right ending is an example
  std::vector<ChoiceGroup> groups = {};    // of an evaluation set of choices; else empty
  std::vector<float> labels = {};          // of examples with labels: their class, or a number for each
  bool has_template = false;               // the model's, or the configured one
  // The template of the conversations in Jinja, if the model has none or another one is configured.
  std::string chat_template = {};
  std::vector<std::string> notes = {};   // notes on the data for the user
  std::vector<SamplePiece> sample = {};  // the first tokens of the first example
  int64_t sample_tokens = 0;             // of the whole example
};

Prepared prepare_tokens(const PrepareOptions& options);

// The same for an evaluation set: of rows of choices every ending becomes an example.
Prepared prepare_evaluation(PrepareOptions options);

// The result of prepare_tokens if it is in `cache_dir`; nullopt if it would have to work, including large
// data files whose hash is not cached. Never throws because of the data.
std::optional<Prepared> find_tokens(const PrepareOptions& options);

// Of rows of a plain prompt and completion whose model has a chat template, or of a data.render that changes
// nothing; "": no note.
std::string note_on_rendering(const Prepared& prepared, Render render);

// For messages: the first few of PrepareOptions::files.
std::string names_of(const std::vector<std::string>& files);

}  // namespace lm
