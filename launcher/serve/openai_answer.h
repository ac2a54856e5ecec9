// The bodies of answers in OpenAI's form: whole, or in the parts of a stream. Pure values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lm {

// A token of an answer, or of a prompt that is echoed.
struct TokenScore {
  std::string text;
  std::optional<double> logprob;                    // unset: nothing precedes the token
  std::vector<std::pair<std::string, double>> top;  // the likeliest tokens in its place, best first
};

// A choice, or what a part of a stream adds to it.
struct AnswerPart {
  int64_t index = 0;
  std::string text = {};
  std::vector<TokenScore> scores = {};
  std::string finish_reason = {};  // "": it goes on
};

struct Usage {
  int64_t prompt_tokens = 0, completion_tokens = 0;
};

class OpenAiAnswer {
 public:
  // `logprobs`: those of tokens were asked for. `created`: seconds since 1970.
  OpenAiAnswer(bool chat, bool logprobs, std::string model, int64_t created);

  std::string whole(const std::vector<AnswerPart>& choices, const Usage& usage) const;
  // Chunks of a streamed answer: the role before a chat's first part, a part, and the usage at the end.
  std::string role_part() const;
  std::string part(const AnswerPart& part);
  std::string usage_part(const Usage& usage) const;

 private:
  bool chat_, logprobs_;
  std::string model_, id_;
  int64_t created_;
  std::vector<int64_t> offsets_;  // of each choice: characters of the tokens so far
};

// The answer to /v1/models.
std::string openai_models(const std::string& model, int64_t created);
std::string openai_model(const std::string& model, int64_t created);

}  // namespace lm
