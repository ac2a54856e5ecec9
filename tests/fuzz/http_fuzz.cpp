// Any bytes as the head of an HTTP request or as the body of one of OpenAI's: refused with a status of 4xx or
// 5xx, or within the limits of what the server takes. The first byte says what the rest is: '0' a head, '1' a
// chat, else completions.
#include <algorithm>

#include "launcher/serve/http_request.h"
#include "launcher/serve/openai_request.h"
#include "tests/fuzz/support.h"

namespace {

using lm::fuzz::require;

constexpr int64_t kVocab = 100;

void check_head(std::string_view text) {
  try {
    const lm::HttpRequest request = lm::parse_http_head(text);
    require(!request.method.empty() && request.path.starts_with('/') && request.body_bytes >= 0);
    require(request.path.find_first_of("? \r\n") == std::string::npos && request.headers.size() <= 100);
    for (const auto& [name, value] : request.headers)
      require(!name.empty() && value.find_first_of("\r\n") == std::string::npos);
  } catch (const lm::HttpFault& fault) {
    require(fault.status >= 400 && fault.status < 600);
  }
}

void check_body(const std::string& text, bool chat) {
  try {
    const lm::OpenAiRequest request = lm::parse_openai_request(text, chat, "model", kVocab);
    require(!request.prompts.empty() && request.prompts.size() <= 256 && request.stop.size() <= 16);
    require(request.temperature >= 0 && request.temperature <= 2 && request.top_p > 0 && request.top_p <= 1);
    require(request.logprobs.value_or(0) >= 0 && request.logprobs.value_or(0) <= 20);
    require(request.max_tokens.value_or(1) >= (request.echo ? 0 : 1) && request.top_k >= 0);
    for (const lm::PromptInput& prompt : request.prompts) {
      require(prompt.is_text || prompt.tokens.empty() == chat);
      require(chat ? !prompt.messages.empty() : prompt.messages.empty());
      require(std::all_of(prompt.tokens.begin(), prompt.tokens.end(),
                          [](int32_t t) { return t >= 0 && t < kVocab; }));
    }
  } catch (const lm::BadRequest& why) {
    require(why.status == 400 || why.status == 404);
    require(lm::openai_error(why.status, why.what(), why.param).starts_with('{'));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text = lm::fuzz::text_of(data + 1, size - 1);
  if (data[0] == '0') {
    check_head(text);
  } else {
    check_body(std::string(text), data[0] == '1');
  }
  return 0;
}
