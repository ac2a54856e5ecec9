#include "launcher/worker/serve_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>

#include "base/error.h"

namespace lm {

namespace {

constexpr auto kMoment = std::chrono::milliseconds(100);
constexpr size_t kMostWaiting = 1024;      // prompts
constexpr int64_t kCompletionTokens = 16;  // OpenAI's default

uint64_t fresh_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

// Tokens with their log-probabilities and the likeliest ones in their place, before they have texts.
struct ScoredTokens {
  struct Top {
    int32_t token = 0;
    double logprob = 0;
  };
  struct One {
    int32_t token = 0;
    std::optional<double> logprob = {};
    std::vector<Top> top = {};
  };
  std::vector<One> tokens;

  void add(int32_t token, std::span<const float> logits, int64_t most) {
    const double largest = *std::ranges::max_element(logits);
    double sum = 0;
    for (const float x : logits) sum += std::exp(x - largest);
    const double log_sum = largest + std::log(sum);
    One one{.token = token, .logprob = logits[static_cast<size_t>(token)] - log_sum};
    for (size_t i = 0; most > 0 && i < logits.size(); ++i) {
      const double logprob = logits[i] - log_sum;
      if (std::ssize(one.top) == most && logprob <= one.top.back().logprob) continue;
      const auto after = std::ranges::find_if(one.top, [&](const Top& top) { return top.logprob < logprob; });
      one.top.insert(after, {static_cast<int32_t>(i), logprob});
      if (std::ssize(one.top) > most) one.top.pop_back();
    }
    tokens.push_back(std::move(one));
  }
};

void Mailbox::put(ServePart part) {
  {
    const std::lock_guard hold(lock_);
    parts_.push_back(std::move(part));
  }
  came_.notify_one();
}

std::optional<ServePart> Mailbox::take() {
  std::unique_lock hold(lock_);
  came_.wait_for(hold, kMoment, [this] { return !parts_.empty(); });
  if (parts_.empty()) return std::nullopt;
  ServePart part = std::move(parts_.front());
  parts_.pop_front();
  return part;
}

// One answer under way: its text up to a stop string, of which no beginning is sent before it is certain.
class ServeEngine::Answering {
 public:
  Answering(ServeEngine& engine, Waiting waiting, int64_t number)
      : engine_(engine), waiting_(std::move(waiting)), number_(number) {
    engine_.chat_prompt_.text().begin_answer(number_);
  }

  const OpenAiRequest& request() const { return *waiting_.request; }

  // What precedes the answer: the prompt, if it is echoed.
  void echo(const std::vector<int32_t>& prompt) {
    usage_.prompt_tokens = std::ssize(prompt);
    if (!request().echo) return;
    const PromptInput& input = request().prompts[static_cast<size_t>(waiting_.index)];
    AnswerPart part{.index = waiting_.index};
    part.text = input.is_text ? input.text : engine_.chat_prompt_.text().decode(prompt).text;
    if (request().logprobs) part.scores = engine_.texts_of(prompt_);
    send(std::move(part));
  }
  // The logits after token number `place` of the prompt score the next one.
  void score_prompt(const std::vector<int32_t>& prompt, int64_t place, std::span<const float> logits) {
    if (place == 0) prompt_.tokens.push_back({.token = prompt.front()});
    const auto next = static_cast<size_t>(place) + 1;
    if (next < prompt.size()) prompt_.add(prompt[next], logits, *request().logprobs);
  }

  // False: the answer ends here.
  bool token(int32_t token, std::span<const float> logits) {
    ++usage_.completion_tokens;
    AnswerPart part{.index = waiting_.index};
    if (request().logprobs) {
      ScoredTokens scored;
      scored.add(token, logits, *request().logprobs);
      part.scores = engine_.texts_of(scored);
    }
    part.text = certain(engine_.chat_prompt_.text().next(token, number_), false);
    if (!part.text.empty() || !part.scores.empty()) send(std::move(part));
    return !found_stop_ && !waiting_.mail->abandoned();
  }

  void end(bool stopped) {
    AnswerPart part{.index = waiting_.index};
    part.text = certain(engine_.chat_prompt_.text().end_answer(number_), true);
    part.finish_reason = stopped || found_stop_ ? "stop" : "length";
    waiting_.mail->put({.answer = std::move(part), .usage = usage_});
  }

 private:
  void send(AnswerPart part) const { waiting_.mail->put({.answer = std::move(part)}); }

  // Of the text so far what can be sent: it ends before a stop string, and before what may become one.
  std::string certain(const std::string& more, bool all) {
    if (found_stop_) return "";
    held_ += more;
    size_t end = held_.size();
    for (const std::string& stop : request().stop) {
      const size_t at = held_.find(stop);
      if (at >= end) continue;
      end = at;
      found_stop_ = true;
    }
    for (size_t begin = 0; !found_stop_ && !all && begin < held_.size(); ++begin) {
      const std::string_view rest = std::string_view(held_).substr(begin);
      if (std::ranges::none_of(request().stop,
                               [&](const std::string& stop) { return stop.starts_with(rest); }))
        continue;
      end = begin;
      break;
    }
    std::string out = held_.substr(0, end);
    held_.erase(0, end);
    return out;
  }

  ServeEngine& engine_;
  Waiting waiting_;
  int64_t number_;
  Usage usage_;
  ScoredTokens prompt_;
  std::string held_;
  bool found_stop_ = false;
};

ServeEngine::ServeEngine(ChatPrompt& chat_prompt, int64_t context)
    : chat_prompt_(chat_prompt), context_(context), batch_(chat_prompt.rank()) {}

void ServeEngine::submit(const std::shared_ptr<const OpenAiRequest>& request,
                         const std::shared_ptr<Mailbox>& mail) {
  {
    const std::lock_guard hold(lock_);
    if (ended_) throw BadRequest("the server is shutting down", "", 503);
    if (waiting_.size() + request->prompts.size() > kMostWaiting)
      throw BadRequest(fmt::format("{} prompts are waiting already", waiting_.size()), "", 503);
    for (int64_t index = 0; index < std::ssize(request->prompts); ++index)
      waiting_.push_back({request, index, mail});
  }
  came_.notify_one();
}

std::optional<ServeEngine::Waiting> ServeEngine::next(bool idle) {
  std::unique_lock hold(lock_);
  if (idle) came_.wait_for(hold, kMoment, [this] { return !waiting_.empty(); });
  if (waiting_.empty()) return std::nullopt;
  Waiting out = std::move(waiting_.front());
  waiting_.pop_front();
  return out;
}

void ServeEngine::run(const std::function<bool()>& stopped) {
  std::vector<std::weak_ptr<Mailbox>> mails;  // of answers that may be under way
  while (!stopped()) {
    while (batch_.has_room()) {
      const std::optional<Waiting> waiting = next(batch_.running() == 0);
      if (!waiting) break;
      if (waiting->mail->abandoned()) continue;
      std::erase_if(mails, [](const auto& mail) { return mail.expired(); });
      mails.push_back(waiting->mail);
      admit(*waiting);
      if (stopped()) break;
    }
    batch_.step();
  }
  const ServePart end{.answer = {}, .refusal = BadRequest("the server is shutting down", "", 503)};
  const std::lock_guard hold(lock_);
  ended_ = true;
  for (const Waiting& one : waiting_) one.mail->put(end);
  for (const std::weak_ptr<Mailbox>& mail : mails) {
    if (const std::shared_ptr<Mailbox> one = mail.lock()) one->put(end);
  }
}

std::vector<int32_t> ServeEngine::prompt_of(const PromptInput& input) {
  if (!input.tokens.empty()) return input.tokens;
  try {
    return input.is_text ? chat_prompt_.text().plain(input.text)
                         : chat_prompt_.text().conversation(input.messages);
  } catch (const Error& error) {
    if (error.text().area == "DATA-23") throw BadRequest(error.text().what, "messages");
    throw;  // the program of the tokenizer has ended
  }
}

std::vector<TokenScore> ServeEngine::texts_of(const ScoredTokens& scored) {
  std::vector<int32_t> all;
  for (const ScoredTokens::One& one : scored.tokens) {
    all.push_back(one.token);
    for (const ScoredTokens::Top& top : one.top) all.push_back(top.token);
  }
  const std::vector<std::string> texts = chat_prompt_.text().decode(all).pieces;
  std::vector<TokenScore> out;
  auto text = texts.begin();
  for (const ScoredTokens::One& one : scored.tokens) {
    TokenScore& score = out.emplace_back(TokenScore{*text++, one.logprob, {}});
    for (const ScoredTokens::Top& top : one.top) score.top.emplace_back(*text++, top.logprob);
  }
  return out;
}

void ServeEngine::admit(const Waiting& waiting) {
  const OpenAiRequest& request = *waiting.request;
  AnswerRequest answer;
  try {
    answer.prompt = prompt_of(request.prompts[static_cast<size_t>(waiting.index)]);
    const char* const param = request.chat ? "messages" : "prompt";
    const int64_t tokens = std::ssize(answer.prompt), room = context_ - tokens;
    if (tokens == 0) throw BadRequest("the tokenizer makes no token of the prompt", param);
    answer.most = request.max_tokens.value_or(request.chat ? std::max<int64_t>(room, 1) : kCompletionTokens);
    if (answer.most > room)
      throw BadRequest(
          fmt::format("the maximum context length is {} tokens (--context); the prompt has {}, and "
                      "the answer may have {}",
                      context_, tokens, answer.most),
          param);
  } catch (const BadRequest& why) {
    waiting.mail->put({.answer = {.index = waiting.index}, .refusal = why});
    return;
  }
  const auto answering = std::make_shared<Answering>(*this, waiting, answers_++);
  const auto prompt = std::make_shared<const std::vector<int32_t>>(answer.prompt);
  const bool scores_prompt = request.echo && request.logprobs.has_value();
  answer.stop = chat_prompt_.text().stop();
  answer.sampling = {.temperature = request.temperature,
                     .top_k = request.top_k,
                     .top_p = request.top_p,
                     .seed = request.seed.value_or(fresh_seed()) + static_cast<uint64_t>(waiting.index)};
  if (scores_prompt) {
    answer.on_prompt = [answering, prompt](int64_t place, std::span<const float> logits) {
      answering->score_prompt(*prompt, place, logits);
      if (place + 1 == std::ssize(*prompt)) answering->echo(*prompt);
    };
  } else {
    answering->echo(*prompt);
  }
  answer.on_token = [answering](int32_t token, std::span<const float> logits) {
    return answering->token(token, logits);
  };
  answer.on_end = [answering](bool stopped) { answering->end(stopped); };
  batch_.add(std::move(answer));
}

}  // namespace lm
