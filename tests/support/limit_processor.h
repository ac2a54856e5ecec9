// LM_CPU in the main functions of tests, as launcher/environment.h has it for the program: the machine stands
// for a lesser one.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "base/processor.h"

namespace lm::test {

// First of all: libraries read their limits at their first use.
inline void limit_processor() {
  const char* name = std::getenv("LM_CPU");
  if (name == nullptr || *name == '\0') return;
  const std::optional<Instructions> most = instructions_of(name);
  if (!most) {
    std::fprintf(stderr, "LM_CPU=%s: want one of %s\n", name, instructions_names().c_str());
    std::exit(2);
  }
  limit_instructions(*most);
  for (const std::string& limit : library_limits()) {
    const size_t equals = limit.find('=');
    setenv(limit.substr(0, equals).c_str(), limit.c_str() + equals + 1, 1);
  }
}

}  // namespace lm::test
