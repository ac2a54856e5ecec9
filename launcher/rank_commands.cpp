#include "launcher/rank_commands.h"

#include "launcher/run.h"

namespace lm {

Exit run_rank_command(const std::vector<std::string>& arguments) {
  const CommandLine line = parse_command_line(arguments, Reader::kRank);
  if (line.command == "train") return run_training(line);
  if (line.command == "eval") return eval_command(line);
  if (line.command == "generate") return generate_command(line);
  if (line.command == "export") return export_command(line);
  if (line.command == "verify") return verify_command(line);
  throw Error(Exit::kUsage, {.area = "USE-20",
                             .what = "the rank's executable has no command " + line.command,
                             .place = "",
                             .next = "start lmlaunch instead",
                             .kept = ""});
}

}  // namespace lm
