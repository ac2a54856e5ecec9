#include "launcher/report/report.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "launcher/cli/commands.h"
#include "launcher/recorded.h"

namespace lm {
Exit report_command(const CommandLine& line) {
  std::vector<Json> records;
  for (const std::string& path : line.positional) records.push_back(RunReport(require_run(path)).record());
  std::string output = line.value("-o").value_or("");
  if (output.empty())
    output =
        records.size() == 1 ? records[0]["directory"].get<std::string>() + "/report.html" : "report.html";
  atomic_write_file(output, report_page(records));
  if (line.has("--json")) {
    std::printf("%s\n", nlohmann::ordered_json{{"page", output}, {"runs", records.size()}}
                            .dump(-1, ' ', false, Json::error_handler_t::replace)
                            .c_str());
  } else {
    std::printf("%s\n", output.c_str());
  }
  return Exit::kDone;
}

}  // namespace lm
