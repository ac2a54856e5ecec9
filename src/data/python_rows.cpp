#include "data/python_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/log.h"
#include "data/prepare_request.h"

namespace lm {
namespace {

using Json = nlohmann::json;

Prepared first_rows_of(const Json& answer, const std::string& key, Render render) {
  Prepared out{.path = key,
               .streamed = true,
               .examples = answer.at("examples").get<int64_t>(),
               .tokens = answer.at("tokens").get<int64_t>(),
               .trained_tokens = answer.at("trained").get<int64_t>()};
  out.plain_pairs = answer.at("pairs").get<int64_t>();
  out.has_template = answer.at("template").get<bool>();
  out.chat_template = answer.at("chat_template").get<std::string>();
  if (answer.at("text").get<bool>()) out.text.push_back({0, 1});
  for (const Json& piece : answer.at("sample"))
    out.sample.push_back({piece.at("text").get<std::string>(), piece.at("trained").get<bool>()});
  out.sample_tokens = answer.at("sample_tokens").get<int64_t>();
  if (const std::string note = note_on_rendering(out, render); !note.empty()) out.notes.push_back(note);
  return out;
}

RowPosition position_of(const Json& answer) {
  const Json& end = answer.at("end");
  return {.file = end.at(0).get<int64_t>(),
          .row = end.at(1).get<int64_t>(),
          .byte = end.at(2).get<int64_t>(),
          .format = end.at(3).is_null() ? "" : end.at(3).get<std::string>(),
          .rows = answer.at("rows").get<int64_t>(),
          .done = answer.at("done").get<int64_t>()};
}

RowChunk chunk_of(const Json& answer, const std::string& payload) {
  RowChunk out{.lengths = answer.at("lengths").get<std::vector<int64_t>>(),
               .tokens = {},
               .trained = {},
               .text = answer.at("texts").get<std::vector<uint8_t>>(),
               .labels = answer.at("labels").get<std::vector<float>>(),
               .end = position_of(answer)};
  const auto tokens =
      static_cast<size_t>(std::accumulate(out.lengths.begin(), out.lengths.end(), int64_t{0}));
  LM_CHECK(std::ranges::all_of(out.lengths, [](int64_t length) { return length > 0; }) &&
               payload.size() == tokens * (sizeof(int32_t) + 1) && out.text.size() == out.lengths.size(),
           "a chunk of rows");
  out.tokens.resize(tokens);
  out.trained.resize(tokens);
  if (tokens == 0) return out;
  std::memcpy(out.tokens.data(), payload.data(), tokens * sizeof(int32_t));
  std::memcpy(out.trained.data(), payload.data() + tokens * sizeof(int32_t), tokens);
  return out;
}

}  // namespace

PythonRows::PythonRows(const PrepareOptions& options, bool says)
    : session_(options.python, options.program_dir + "/stream.py", {.stopped = options.stopped}),
      says_(says) {
  const std::vector<std::string> files = expand_files(options.files, options.caches);
  ContentHasher hasher(options.cache_dir + "/hashes");
  const ContentKey key = stream_key(options, files, hasher);
  std::memcpy(&fingerprint_, key.data(), sizeof fingerprint_);
  const Json answer = session_.ask(prepare_request(options, files));
  total_bytes_ = answer.at("total_bytes").get<int64_t>();
  first_rows_ = first_rows_of(answer, to_hex(key), options.render);
}

void PythonRows::note(const Json& answer) const {
  if (!says_) return;
  for (const Json& note : answer.at("notes")) log_note("DATA-24", note.get<std::string>());
}

void PythonRows::seek(const RowPosition& position) {
  const Json format = position.format.empty() ? Json() : Json(position.format);
  session_.ask(Json::object({{"start", Json::array({position.file, position.row, position.byte, format})},
                             {"rows", position.rows}}));
}

std::optional<RowChunk> PythonRows::next() {
  const Json answer = session_.ask(Json::object({{"next", 1}}));
  note(answer);
  if (answer.contains("last")) return std::nullopt;
  return chunk_of(answer, session_.take(answer.at("bytes").get<size_t>()));
}

}  // namespace lm
