#include "data/look.h"

#include "data/content_key.h"
#include "data/python.h"

namespace lm {

void look_at_rows(const std::vector<std::string>& entries, const DataCaches& caches,
                  const std::string& python, const std::string& program_dir) {
  ask_python(python, program_dir + "/look.py", {{"files", expand_files(entries, caches)}});
}

}  // namespace lm
