#include <filesystem>

#include "base/file.h"
#include "data/template_date.h"
#include "launcher/cached_data.h"
#include "launcher/recorded.h"
#include "launcher/worker/job.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

JobData open_data_here(const Job& job, const std::function<bool()>& stopped, int rank) {
  const Config& config = job.config;
  JobData data;
  data.cache = std::make_unique<TokenCache>(config.data, job.environment.token_cache(), job.run, rank == 0);
  PrepareOptions options = prepare_options(config, job.model, job.environment, job.date);
  options.cache_dir = data.cache->directory();
  options.workers = job.plan.numerics.threads;
  options.stopped = stopped;
  if (config.data.streaming) {
    data.rows = std::make_unique<PythonRows>(options, rank == 0);
    data.train = data.rows->first_rows();
  } else {
    data.train = prepare_tokens(options);
    data.train_source = std::make_unique<TokenFile>(data.train.path);
  }
  std::vector<EvalSource> evals;
  for (const EvalSet& set : config.data.eval.all) {
    options.files = set.files;
    const Prepared& made = data.evals.emplace_back(prepare_evaluation(options));
    data.eval_sources.push_back(std::make_unique<TokenFile>(made.path));
    evals.push_back(
        {data.eval_sources.back().get(), set.name, names_of(set.files), made.text, made.groups, made.labels});
  }
  LoaderOptions sequences = loader_options(config, job.model, data.train, job.plan.numerics.micro_batch);
  sequences.rank = rank;
  sequences.world = job.plan.numerics.ranks;
  if (!data.rows) {
    data.loader = std::make_unique<Loader>(*data.train_source, evals, sequences);
    return data;
  }
  data.loader = std::make_unique<Loader>(evals, sequences);
  sequences.text.clear();  // of the sample
  data.stream =
      std::make_unique<StreamLoader>(*data.rows, StreamOptions{.sequences = sequences,
                                                               .window = config.data.shuffle_window,
                                                               .fingerprint = data.rows->fingerprint(),
                                                               .reports = rank == 0});
  return data;
}

}  // namespace

JobData open_data(Job& job, const std::string& run, const std::function<bool()>& stopped, Ranks* ranks) {
  const auto date = [&] { return recorded_date(run); };
  job.date = ranks == nullptr ? date() : ranks->from_leader("date", date);
  const bool keeps = ranks != nullptr && ranks->leads();
  if (keeps && template_asks_for_date(job.config.data.chat_template, job.model.directory))
    atomic_write_file(run + "/" + kDateFile, job.date + "\n");
  // Rank 0 makes the token files, and the others find them.
  if (ranks == nullptr) return open_data_here(job, stopped, 0);
  JobData data;
  ranks->in_turn("token files", [&] { data = open_data_here(job, stopped, ranks->group().rank()); });
  // Their names are hashes of their sources.
  const auto name = [](const Prepared& made) { return fs::path(made.path).filename().string(); };
  std::string names = name(data.train);
  for (const Prepared& made : data.evals) names += " " + name(made);
  ranks->agree("training text", names, "give all machines the same files and tokenizer");
  return data;
}

}  // namespace lm
