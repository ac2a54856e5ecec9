// The least configuration, and what is said of one that is wrong.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "config/config_toml.h"

namespace lm {

inline constexpr const char* kLeast = "[model]\npath = \"m\"\n[data]\ntrain = [\"t.jsonl\"]\n";

// "" if nothing is wrong.
inline std::string failure(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(text, "c.toml", overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    return error.report();
  }
  return "";
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "no <" << (part) << "> in\n" << (text)

}  // namespace lm
