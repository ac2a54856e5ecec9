#include <filesystem>

#include "base/file.h"
#include "base/process.h"
#include "data/template_date.h"
#include "launcher/rank/job.h"
#include "launcher/recorded.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

PrepareOptions prepare_options(const Job& job, const std::vector<std::string>& files,
                               const TokenCache& cache) {
  const DataConfig& data = job.config.data;
  const fs::path program =
      fs::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/prepare";
  return {.files = files,
          .format = data.format,
          .loss_on = data.loss_on,
          .columns = data.columns,
          .chat_template = data.chat_template,
          .render = data.render,
          .bad_rows = data.bad_rows,
          .answers = data.answers,
          .reasoning = data.reasoning,
          .model_dir = job.model.directory,
          .cache_dir = cache.directory(),
          .python = job.environment.python,
          .program_dir = program.lexically_normal().string(),
          .workers = job.plan.numerics.threads,
          .vocab = job.model.spec.vocab,
          .date = job.date,
          .caches = {job.environment.hub_caches, job.environment.datasets_caches},
          .stopped = {}};
}

JobData open_data_here(const Job& job, const std::function<bool()>& stopped, int rank) {
  const Config& config = job.config;
  JobData data;
  data.cache = std::make_unique<TokenCache>(config.data, job.environment.token_cache(), job.run, rank == 0);
  PrepareOptions options = prepare_options(job, config.data.train, *data.cache);
  options.stopped = stopped;
  data.train = prepare_tokens(options);
  data.train_source = std::make_unique<TokenFile>(data.train.path);
  std::vector<EvalSource> evals;
  for (const EvalSet& set : config.data.eval.all) {
    options.files = set.files;
    const Prepared& made = data.evals.emplace_back(prepare_tokens(options));
    data.eval_sources.push_back(std::make_unique<TokenFile>(made.path));
    evals.push_back({data.eval_sources.back().get(), set.name, names_of(set.files), made.text});
  }
  std::vector<std::pair<ExampleRange, double>> weights;
  for (size_t i = 0; i < config.data.weights.size(); ++i)
    weights.emplace_back(data.train.entries.at(i), config.data.weights[i]);
  data.loader = std::make_unique<Loader>(*data.train_source, evals,
                                         LoaderOptions{.seed = config.run.seed,
                                                       .max_length = config.data.max_length,
                                                       .too_long = config.data.too_long,
                                                       .packing = config.data.packing,
                                                       .global_batch = config.train.global_batch,
                                                       .micro_batch = job.plan.numerics.micro_batch,
                                                       .vocab = job.model.spec.vocab,
                                                       .eval_fraction = config.data.eval_fraction,
                                                       .text = data.train.text,
                                                       .weights = weights,
                                                       .name = names_of(config.data.train),
                                                       .rank = rank,
                                                       .world = job.plan.numerics.ranks});
  return data;
}

}  // namespace

JobData open_data(Job& job, const std::string& run, const std::function<bool()>& stopped, Ranks* ranks) {
  const auto date = [&] { return recorded_date(run); };
  job.date = ranks == nullptr ? date() : ranks->from_leader("date", date);
  const bool keeps = ranks != nullptr && ranks->leads();
  if (keeps && template_asks_for_date(job.config.data.chat_template, job.model.directory))
    atomic_write_file(run + "/" + kDateFile, job.date + "\n");
  // The leader makes the token files, and the others find them.
  if (ranks == nullptr) return open_data_here(job, stopped, 0);
  JobData data;
  ranks->in_turn("token files", [&] { data = open_data_here(job, stopped, ranks->group().rank()); });
  // Their names are hashes of what they were made from.
  const auto name = [](const Prepared& made) { return fs::path(made.path).filename().string(); };
  std::string names = name(data.train);
  for (const Prepared& made : data.evals) names += " " + name(made);
  ranks->agree("training text", names, "give all machines the same files and tokenizer");
  return data;
}

}  // namespace lm
