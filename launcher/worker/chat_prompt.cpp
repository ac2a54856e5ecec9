#include "launcher/worker/chat_prompt.h"

#include <filesystem>
#include <optional>

#include "base/process.h"
#include "launcher/grown_model.h"
#include "launcher/model_place.h"
#include "launcher/recorded.h"
#include "launcher/score_model.h"
#include "launcher/worker/run_files.h"
#include "weights/model_directory.h"

namespace lm {

TextTools text_tools(const Environment& environment, const std::string& model_dir,
                     const std::string& chat_template, const std::string& date, Render render) {
  const std::filesystem::path program =
      std::filesystem::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/prepare";
  return {environment.python,      program.lexically_normal().string(), model_dir, chat_template, date,
          render == Render::kPlain};
}

TextTools text_tools(const Job& job) {
  return text_tools(job.environment, job.model.directory, job.chat_template, job.date,
                    job.config.data.render);
}

ChatPrompt::ChatPrompt(const CommandLine& line)
    : line_(line), subject_(open_subject(line.positional[0], line.overrides)) {
  const Environment environment = read_environment();
  if (const std::vector<std::string> adapters = line.list("--adapter"); !adapters.empty()) {
    scratch_ = std::make_unique<ScratchDirectory>();
    add_adapters(adapters, *scratch_, subject_);
  }
  const std::string model = resolve_model(subject_.config.model.path, environment, subject_.config.lora.init);
  spec_ = read_model_spec(model);
  const std::optional<GrownVocabulary> grown = grow_vocabulary(subject_.config, model, spec_);
  const std::string whole =
      grown ? grown_directory(*grown, subject_.config, model, environment) : model;  // with their tokenizer
  if (trains_scores(subject_.config)) settle_scores(subject_.config, model, spec_);
  refuse_scores(spec_, is_of_scores(subject_), line.positional[0]);
  text_ = std::make_unique<TextSession>(text_tools(environment, whole, own_template(subject_),
                                                   recorded_date(subject_.run), subject_.config.data.render));
}

void ChatPrompt::load(int64_t positions, int64_t texts) {
  subject_.config.data.max_length = std::max<int64_t>(positions, 2) + virtual_tokens(subject_.config);
  subject_.config.data.packing = false;  // a text is one document
  subject_.config.train.global_batch = texts;
  subject_.config.train.micro_batch = texts;
  job_ = open_job(subject_.config, line_, PlanPurpose::kGenerate);
  rank_ = make_rank(*job_, false);
  load_rank(*job_, *rank_, subject_.trained);
  scratch_.reset();
}

ChatPrompt::Spoken ChatPrompt::answer(std::span<const int32_t> prompt, AnswerOptions options,
                                      const std::function<void(const std::string&)>& on_text) {
  Spoken out;
  const auto tell = [&](const std::string& piece) {
    out.text += piece;
    if (!piece.empty()) on_text(piece);
  };
  options.stop = text_->stop();
  options.on_token = [&](int32_t token) { tell(text_->next(token)); };
  text_->begin_answer();
  static_cast<Answer&>(out) = answer_prompt(*rank_, prompt, options);
  tell(text_->end_answer());
  return out;
}

}  // namespace lm
