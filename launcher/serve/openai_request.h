// The body of a request to OpenAI's /v1/completions or /v1/chat/completions, from an untrusted client: what
// is not supported is refused, not ignored. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/json.h"
#include "data/text.h"

namespace lm {

// Status 400, or 404 for a model that is not served. `param`: the key that is wrong, "" if it is not one.
struct BadRequest : std::runtime_error {
  BadRequest(const std::string& what, std::string param_, int status_ = 400)
      : std::runtime_error(what), param(std::move(param_)), status(status_) {}
  std::string param;
  int status;
};

// One prompt of a request; one of the three is there.
struct PromptInput {
  std::string text = {};
  std::vector<int32_t> tokens = {};
  std::vector<ChatMessage> messages = {};
  bool is_text = false;
};

struct OpenAiRequest {
  bool chat = false;
  std::vector<PromptInput> prompts = {};  // of a chat one
  std::optional<int64_t> max_tokens = {};
  double temperature = 1, top_p = 1;
  int64_t top_k = 0;  // 0: all; not OpenAI's
  std::optional<uint64_t> seed = {};
  std::vector<std::string> stop = {};
  std::optional<int64_t> logprobs = {};  // alternatives to each token; unset: no log-probabilities
  bool echo = false;                     // the answer begins with the prompt
  bool stream = false, include_usage = false;
};

// `model`: the name that is served; a request may leave it out, but not name another one. `vocab`: tokens of
// the model. Throws BadRequest.
OpenAiRequest parse_openai_request(const std::string& body, bool chat, const std::string& model,
                                   int64_t vocab);

// The answer to a request that is refused.
std::string openai_error(int status, const std::string& message, const std::string& param = "");

}  // namespace lm
