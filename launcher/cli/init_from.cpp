#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/process.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "config/words/translate.h"
#include "launcher/cli/commands.h"
#include "launcher/environment.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

constexpr size_t kCommentColumn = 38;

Error refusal(Exit code, const std::string& what, const std::string& place, const std::string& next) {
  return Error(
      code, {.area = "INIT-22", .what = what, .place = place, .next = next, .kept = "nothing was written"});
}

// The Python that prepares data reads YAML: its tokenizers package brings PyYAML, in a wheel as here.
Json read_yaml(const std::string& text, const std::string& place) {
  const std::string python = read_environment().python;
  const fs::path program =
      fs::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/foreign/yaml_json.py";
  const ProgramResult result =
      run_program({.argv = {python, "-I", "-B", program.lexically_normal().string()}}, text, log_line, {});
  if (result.error != 0)
    throw refusal(Exit::kConfig,
                  std::string("cannot start Python to read YAML: ") + std::strerror(result.error), python,
                  "set LMLAUNCH_PYTHON to a Python with PyYAML, or give the file as JSON");
  const Json answer = Json::parse(result.output, nullptr, false);
  if (result.status != 0 || !answer.is_object())
    throw refusal(Exit::kInput, "the program that reads YAML failed", place, "see its message above");
  if (!answer.contains("error")) return answer["content"];
  const Json& error = answer["error"];
  const std::string where = error.value("place", "");
  throw refusal(Exit::kInput, error.value("what", "unknown"), place + (where.empty() ? "" : ", " + where),
                error.value("next", ""));
}

ForeignFile read_foreign(const std::string& path) {
  const std::string text = read_small_file(path, 1 << 20);
  const size_t first = text.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
  const bool json =
      fs::path(path).extension() == ".json" || (first != std::string::npos && text[first] == '{');
  return {path, json ? parse_json(text, path) : read_yaml(text, path)};
}

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

// A value of the foreign file may contain a line break.
std::string comment_text(const std::string& text) {
  std::string out;
  for (const char c : escape_controls(text)) out += c == '\n' ? ' ' : c;
  return out;
}

// Each reason once, after all keys that have it.
std::string reasons(const std::string& title, const std::vector<Translated::Left>& all) {
  std::map<std::string, std::vector<std::string>> keys;
  for (const auto& [theirs, why] : all) {
    std::vector<std::string>& named = keys[why];
    if (std::ranges::find(named, theirs) == named.end()) named.push_back(theirs);
  }
  std::string out;
  for (const auto& [why, named] : keys) out += "#   " + comment_text(joined(named) + ": " + why) + "\n";
  return out.empty() ? out : "\n# " + title + "\n" + out;
}

std::string words_of(const std::string& title, std::vector<std::string> all) {
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all.empty() ? "" : "\n# " + title + " " + comment_text(joined(all)) + "\n";
}

std::string config_text(const Translated& done, const std::vector<std::string>& files,
                        const std::string& output) {
  std::vector<std::string> sources;
  for (size_t i = 0; i < files.size(); ++i)
    sources.push_back(files[i] + " (" + std::string(project_name(done.projects[i])) + ")");
  std::string out = "# Translated by `lmlaunch init --from` from " + comment_text(joined(sources)) +
                    ".\n# Does it fit: lmlaunch plan " + output + "   Start it: lmlaunch " + output +
                    "\n# The comment behind a value names the key that it comes from.\n";
  if (done.of_one_device)
    out += "# train.global_batch was computed for one device: for N devices, multiply it by N.\n";
  ConfigLines lines;
  for (const auto& [key, value, from] : done.settings) lines.set(key, value, comment_text(joined(from)));
  return out + "\n" + lines.text(kCommentColumn) + words_of("Unknown, left out:", done.unknown) +
         reasons("Not in lmlaunch (the run differs by these):", done.missing) +
         reasons("Not needed:", done.unneeded) + words_of("Off or empty in the source:", done.off);
}

std::string default_output(const CommandLine& line) {
  if (const auto given = line.value("-o")) return *given;
  return fs::path(line.list("--from").front()).filename().replace_extension(".toml").string();
}

// Prints on standard error what a user should check before training.
void say(const Translated& done, const std::string& output) {
  std::fprintf(stderr, "%zu settings carried over; %zu keys not needed, %zu not in lmlaunch; reasons in %s\n",
               done.settings.size(), done.unneeded.size(), done.missing.size(), output.c_str());
  for (const auto& [theirs, why] : done.missing)
    std::fprintf(stderr, "  differs: %s: %s\n", comment_text(theirs).c_str(), comment_text(why).c_str());
  for (const std::string& theirs : done.unknown)
    std::fprintf(stderr, "  unknown, left out: %s\n", comment_text(theirs).c_str());
}

}  // namespace

Exit init_from_command(const CommandLine& line) {
  if (line.has("--words")) {
    std::fputs(coming_from_page().c_str(), stdout);
    return Exit::kDone;
  }
  const std::vector<std::string> files = line.list("--from");
  const std::string output = default_output(line);
  std::error_code ignored;
  if (fs::exists(output, ignored))
    throw refusal(Exit::kIncompatible, "the file already exists, and was not changed", output,
                  "remove it, or name another one with -o");
  std::vector<ForeignFile> contents;
  for (const std::string& file : files) contents.push_back(read_foreign(file));
  const std::vector<std::string>& words = line.positional;
  const std::vector<std::string> data(words.begin() + (words.empty() ? 0 : 1), words.end());
  const Translated done = translate(contents, words.empty() ? "" : words[0], data);
  const std::string text = config_text(done, files, output);
  parse_config(text, output, {});  // checks the written text
  atomic_write_file(output, text);
  say(done, output);
  std::printf("%s\n", output.c_str());
  return Exit::kDone;
}

}  // namespace lm
