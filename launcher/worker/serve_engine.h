// The answers that `serve` computes: requests wait in a queue, and those under way are continued together.
// The connections' threads submit requests and take parts of their answers; one thread, which has the model,
// runs the engine.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "launcher/serve/openai_answer.h"
#include "launcher/serve/openai_request.h"
#include "launcher/worker/answer_batch.h"
#include "launcher/worker/chat_prompt.h"

namespace lm {

// A part of one of the answers to a request.
struct ServePart {
  AnswerPart answer;
  Usage usage = {};                        // of the choice, once it has ended
  std::optional<BadRequest> refusal = {};  // in place of all of them
};

// Where a request's parts wait for the connection's thread.
class Mailbox {
 public:
  void put(ServePart part);
  // Nothing: none has come for a moment.
  std::optional<ServePart> take();
  // Nobody waits any more: answers under way end.
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

 private:
  std::mutex lock_;
  std::condition_variable came_;
  std::deque<ServePart> parts_;
  std::atomic<bool> abandoned_ = false;
};

class ServeEngine {
 public:
  // `chat_prompt` is loaded; `context`: tokens of a prompt and its answer.
  ServeEngine(ChatPrompt& chat_prompt, int64_t context);

  // Any thread. A part for each token of each prompt's answer, and a last one with its finish reason, go to
  // `mail`. Throws BadRequest(503) if too many wait, and once the engine has ended.
  void submit(const std::shared_ptr<const OpenAiRequest>& request, const std::shared_ptr<Mailbox>& mail);
  // Until `stopped`; what is under way then is refused with 503.
  void run(const std::function<bool()>& stopped);

 private:
  struct Waiting {
    std::shared_ptr<const OpenAiRequest> request;
    int64_t index = 0;  // of the prompt
    std::shared_ptr<Mailbox> mail;
  };
  class Answering;

  std::optional<Waiting> next(bool idle);
  void admit(const Waiting& waiting);
  std::vector<int32_t> prompt_of(const PromptInput& input);
  std::vector<TokenScore> texts_of(const struct ScoredTokens& scored);

  ChatPrompt& chat_prompt_;
  int64_t context_;
  AnswerBatch batch_;
  int64_t answers_ = 0;  // so far: the numbers that the text session knows them by

  std::mutex lock_;  // of what follows
  std::condition_variable came_;
  std::deque<Waiting> waiting_;
  bool ended_ = false;
};

}  // namespace lm
