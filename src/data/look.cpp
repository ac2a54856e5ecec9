#include "data/look.h"

#include "data/content_key.h"
#include "data/python.h"

namespace lm {

SeenRows look_at_rows(const std::vector<std::string>& entries, const DataCaches& caches,
                      const std::string& model_dir, const std::string& python,
                      const std::string& program_dir) {
  const nlohmann::json seen = ask_python(
      python, program_dir + "/look.py", {{"files", expand_files(entries, caches)}, {"model_dir", model_dir}});
  const auto number = [&](const char* key) { return seen.at(key).get<int64_t>(); };
  return {.rows = number("rows"),
          .examples = number("examples"),
          .length = number("length"),
          .longest = number("longest"),
          .texts = number("texts")};
}

}  // namespace lm
