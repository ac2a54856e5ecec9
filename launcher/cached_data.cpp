#include "launcher/cached_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/process.h"
#include "data/content_key.h"
#include "launcher/recorded.h"

namespace lm {

namespace fs = std::filesystem;

// Reading so many rows for a plan takes some hundred milliseconds. With more data a plan assumes full rows
// until a run has begun.
constexpr int64_t kMostRowsPlanned = 1'000'000;

PrepareOptions prepare_options(const Config& config, const PlannedModel& model,
                               const Environment& environment, const std::string& date) {
  const DataConfig& data = config.data;
  const ScoreHead& score = model.spec.score;
  const fs::path program =
      fs::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/prepare";
  return {.files = data.train,
          .format = data.format,
          .loss_on = data.loss_on,
          .columns = data.columns,
          .chat_template = data.chat_template,
          .render = data.render,
          .bad_rows = data.bad_rows,
          .max_rows = data.max_rows,
          .answers = data.answers,
          .reasoning = data.reasoning,
          .objective = config.train.objective,
          .labels = score.labels,
          .problem = score.problem,
          .model_dir = model.directory,
          .cache_dir = data.cache_dir.empty() ? environment.token_cache() : data.cache_dir,
          .python = environment.python,
          .program_dir = program.lexically_normal().string(),
          .vocab = model.spec.vocab,
          .date = date,
          .caches = {environment.hub_caches, environment.datasets_caches},
          .stopped = {}};
}

LoaderOptions loader_options(const Config& config, const PlannedModel& model, const Prepared& train,
                             int64_t micro_batch) {
  std::vector<std::pair<ExampleRange, double>> weights;
  for (size_t i = 0; i < config.data.weights.size(); ++i)
    weights.emplace_back(train.entries.at(i), config.data.weights[i]);
  std::optional<ScoredData> scored;
  if (model.spec.scores()) {
    const bool classify = config.train.objective == ObjectiveChoice::kClassify;
    const bool single = model.spec.score.problem == LabelProblem::kSingleLabel;
    scored = ScoredData{.pairs = !classify,
                        .labels = !classify ? 0
                                  : single  ? 1
                                            : model.spec.head_rows(),
                        .pad_token = static_cast<int32_t>(model.spec.score.pad_token)};
  }
  return {.seed = config.run.seed,
          .max_length = config.data.max_length,
          .virtual_tokens = model.virtual_tokens(),
          .too_long = config.data.too_long,
          .packing = config.data.packing,
          .global_batch = config.train.global_batch,
          .micro_batch = micro_batch,
          .vocab = model.spec.vocab,
          .shuffle = config.data.shuffle,
          .eval_fraction = config.data.eval_fraction,
          .text = train.text,
          .weights = weights,
          .scored = scored,
          .labels = train.labels,
          .name = names_of(config.data.train)};
}

DataShape data_shape(Loader& loader) {
  const EpochCounts counts = loader.counts_of(0);
  if (counts.sequences == 0 || counts.tokens == 0) return {};
  const auto tokens = static_cast<double>(counts.tokens);
  return {.mean_length = tokens / static_cast<double>(counts.sequences),
          .document_length = counts.squares / tokens,
          .target_share = static_cast<double>(counts.targets) / tokens,
          .sequences = counts.sequences};
}

DataShape data_shape(const Prepared& first, const Config& config) {
  if (first.examples == 0) return {};
  // A document of the cut examples; packed sequences are full but for a few tokens.
  const double most = static_cast<double>(config.data.max_length);
  const double mean = static_cast<double>(first.tokens) / static_cast<double>(first.examples);
  const double length = std::min(mean, most);
  return {.mean_length = config.data.packing ? most : length,
          .document_length = length,
          .target_share = static_cast<double>(first.trained_tokens) / static_cast<double>(first.tokens)};
}

std::optional<DataShape> cached_data_shape(const Config& config, const PlannedModel& model,
                                           const Environment& environment, const std::string& run) {
  if (model.directory.empty() || config.data.train.empty() || config.data.streaming) return std::nullopt;
  try {
    const auto tokens = find_tokens(prepare_options(config, model, environment, recorded_date(run)));
    if (!tokens || tokens->examples > kMostRowsPlanned) return std::nullopt;
    const TokenFile file(tokens->path);
    Loader loader(file, nullptr, loader_options(config, model, *tokens, 1));
    return data_shape(loader);
  } catch (const Error&) {  // a run reports mistakes in its data; a plan need not
    return std::nullopt;
  }
}

StreamedFiles streamed_files(const Config& config, const Environment& environment) {
  StreamedFiles out;
  if (!config.data.streaming) return out;
  try {
    for (const std::string& file :
         expand_files(config.data.train, {environment.hub_caches, environment.datasets_caches})) {
      ++out.files;
      std::error_code ignored;
      out.bytes += static_cast<int64_t>(fs::file_size(file, ignored));
    }
    out.found = true;
  } catch (const Error&) {  // a run reports missing files; a plan need not
    return {};
  }
  return out;
}

std::string describe_streamed(const Config& config, const StreamedFiles& files) {
  if (!config.data.streaming) return "";
  const DataConfig& data = config.data;
  return fmt::format(
      "data: {} read and tokenized as the run goes, by each rank; at most {} documents are in memory{}, and "
      "no "
      "tokens on a disk\n",
      files.found ? fmt::format("{} file{}, {}, are", files.files, files.files == 1 ? "" : "s",
                                format_bytes(files.bytes))
                  : "its files are",
      data.shuffle_window, data.shuffle ? ", shuffled among themselves" : "");
}

}  // namespace lm
