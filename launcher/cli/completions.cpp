#include <cstdio>

#include "config/config_print.h"
#include "launcher/cli/commands.h"

namespace lm {
namespace {

// If nothing here fits, `-o default` completes names of files.
constexpr char kScript[] = R"script(# bash and zsh: eval "$(lmlaunch completions)"
if [ -n "${ZSH_VERSION-}" ]; then  # zsh takes bash's completions where it is told to
  type compdef >/dev/null 2>&1 || { autoload -Uz compinit && compinit; }
  autoload -Uz bashcompinit && bashcompinit
fi
_lmlaunch() {
  local word=${COMP_WORDS[COMP_CWORD]} flags
  case ${COMP_WORDS[1]} in
%s    *) flags='%s' ;;
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [[ $COMP_CWORD == 1 ]]; then
    COMPREPLY=($(compgen -W '%s' -- "$word"))
  else
    COMPREPLY=($(compgen -W '%s' -- "$word"))
    [ ${#COMPREPLY[@]} = 0 ] || compopt -o nospace 2>/dev/null
  fi
}
# zsh has no compopt: there no blank follows a word, so that the value of a key can be typed at once.
complete -o default ${ZSH_VERSION:+-o} ${ZSH_VERSION:+nospace} -F _lmlaunch lmlaunch
)script";

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

}  // namespace

Exit completions_command(const CommandLine&) {
  std::string flags;
  for (const std::string& command : command_names())
    flags += "    " + command + ") flags='" + joined(flag_names(command)) + "' ;;\n";
  std::vector<std::string> keys;
  for (const KeyText& key : known_keys()) keys.push_back(key.table + "." + key.name + "=");
  std::printf(kScript, flags.c_str(), joined(flag_names("train")).c_str(), joined(command_names()).c_str(),
              joined(keys).c_str());
  return Exit::kDone;
}

}  // namespace lm
