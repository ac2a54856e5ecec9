#include "launcher/refusal_text.h"

#include "base/json.h"

namespace lm {

std::string refusal_text(const Error& error) {
  const ErrorText& text = error.text();
  return Json{{"code", static_cast<int>(error.code())},
              {"area", text.area},
              {"what", text.what},
              {"place", text.place},
              {"next", text.next},
              {"kept", text.kept},
              {"otherwise", text.otherwise}}
      .dump(-1, ' ', true, Json::error_handler_t::replace);
}

Error parse_refusal(const std::string& text) {
  const Json json = parse_json(text, "--refused", {.bytes = 1 << 20, .depth = 4});
  const auto word = [&json](const char* key) { return json.at(key).get<std::string>(); };
  return Error(static_cast<Exit>(json.at("code").get<int>()), {.area = word("area"),
                                                               .what = word("what"),
                                                               .place = word("place"),
                                                               .next = word("next"),
                                                               .kept = word("kept"),
                                                               .otherwise = word("otherwise")});
}

}  // namespace lm
