// Every key of the configuration against every kind of mistake, generated from the visitor, so that a new key
// is tested the day it is added.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "config/nearest.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

enum class Kind {
  kText,
  kTexts,
  kInteger,
  kNumber,
  kNumbers,
  kNames,
  kPairs,
  kGroups,
  kFlag,
  kChoice,
  kChoices,
  kSize,
  kBudget,
  kTime,
  kInterval,
  kLevel,
  kTokens
};

struct KeyCase {
  std::string table, name, good;  // good: a value it accepts, as TOML
  Kind kind;
  KeyInfo info;
  bool optional = false;
};

Kind kind_of(const std::string*) {
  return Kind::kText;
}
Kind kind_of(const std::vector<std::string>*) {
  return Kind::kTexts;
}
Kind kind_of(const EvalSets*) {
  return Kind::kTexts;  // and tables, of which there is none among the wrong values that is right
}
Kind kind_of(const int64_t*) {
  return Kind::kInteger;
}
Kind kind_of(const double*) {
  return Kind::kNumber;
}
Kind kind_of(const std::vector<double>*) {
  return Kind::kNumbers;
}
Kind kind_of(const std::vector<int64_t>*) {
  return Kind::kNumbers;
}
Kind kind_of(const ColumnNames*) {
  return Kind::kNames;
}
// A table of other values: none of the wrong ones is right but for kPairs.
template <class T>
Kind kind_of(const ModuleValues<T>*) {
  return Kind::kPairs;
}
Kind kind_of(const std::vector<OptimizerGroup>*) {
  return Kind::kGroups;
}
Kind kind_of(const std::vector<TokenName>*) {
  return Kind::kTokens;
}
Kind kind_of(const bool*) {
  return Kind::kFlag;
}
Kind kind_of(const ByteSize*) {
  return Kind::kSize;
}
Kind kind_of(const Duration*) {
  return Kind::kTime;
}
Kind kind_of(const Interval*) {
  return Kind::kInterval;
}
Kind kind_of(const RecomputeChoice*) {
  return Kind::kLevel;
}
Kind kind_of(const Budget*) {
  return Kind::kBudget;
}
template <class E>
requires std::is_enum_v<E> Kind kind_of(const E*) {
  return Kind::kChoice;
}
template <class E>
requires std::is_enum_v<E> Kind kind_of(const std::vector<E>*) {
  return Kind::kChoices;
}
template <class T>
Kind kind_of(const std::optional<T>*) {
  return kind_of(static_cast<const T*>(nullptr));
}

template <class T>
inline constexpr bool kIsOptional = false;
template <class T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

struct Collector {
  std::vector<KeyCase> keys;
  void table(const char*, const char*) {}
  template <class T>
  void key(const char* table, const char* name, const T& field, const KeyInfo& info) {
    keys.push_back(
        {table, name, value_text(field), kind_of(static_cast<const T*>(nullptr)), info, kIsOptional<T>});
  }
};

std::vector<KeyCase> all_keys() {
  Config config;
  config.model.path = "m";
  config.data.train = {"t.jsonl"};
  Collector collector;
  visit_config(config, collector);
  return std::move(collector.keys);
}

// Rules may have keys of the same name.
bool is_same(const KeyCase& a, const KeyCase& b) {
  const auto rule = [](const KeyCase& key) {
    return std::string(key.info.rule == nullptr ? "" : key.info.rule);
  };
  return a.table == b.table && a.name == b.name && rule(a) == rule(b);
}

// The text of a valid file in which the line of `key` is `line`; `number` becomes that line's number.
std::string file_with(const KeyCase& key, const std::string& line, int* number) {
  std::string out;
  int lines = 0;
  const auto add = [&](const std::string& text) {
    out += text + "\n";
    lines += 1 + static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  };
  std::string table;
  for (const KeyCase& other : all_keys()) {
    const bool chooses = key.info.rule != nullptr && other.table == "optimizer" && other.name == "name";
    const bool needed = other.info.required || chooses || is_same(other, key);
    if (!needed) continue;
    if (table != other.table) add("[" + (table = other.table) + "]");
    if (is_same(other, key)) {
      *number = lines + 1;
      add(line);
    } else {
      add(other.name + " = " + (chooses ? quote(key.info.rule) : other.good));
    }
  }
  return out;
}

std::string report_of(const std::string& text) {
  try {
    parse_config(text, "f.toml");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    return error.report();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Every deletion, swap, and a few substitutions and insertions; twice for distance 2.
std::set<std::string> typos(const std::string& word) {
  std::set<std::string> out;
  for (size_t i = 0; i < word.size(); ++i) {
    std::string less = word, other = word, more = word;
    out.insert(less.erase(i, 1));
    other[i] = other[i] == 'q' ? 'w' : 'q';
    out.insert(other);
    out.insert(more.insert(i, 1, word[i]));
    if (i + 1 < word.size()) {
      std::string swapped = word;
      std::swap(swapped[i], swapped[i + 1]);
      out.insert(swapped);
    }
  }
  out.erase(word);
  out.erase("");
  return out;
}

TEST(ConfigGenerated, EveryTypoIsFoundAtItsPlaceWithTheRightSuggestion) {
  int cases = 0, right = 0;
  std::string wrong;
  const int every = test::counts(12, 3);
  for (const KeyCase& key : all_keys()) {
    std::set<std::string> words = typos(key.name);
    // Distance 2: one more mistake in some of them.
    int turn = 0;
    for (const std::string& once : std::set<std::string>(words)) {
      if (turn++ % every == 0) {
        for (const std::string& twice : typos(once)) words.insert(twice);
      }
    }
    for (const std::string& word : words) {
      const int distance = edit_distance(word, key.name);
      if (distance == 0 || distance > 2) continue;
      // A key of this name exists: then it is no typo. One-letter keys leave nothing to recognise at
      // distance 2.
      bool exists = false;
      for (const KeyCase& other : all_keys()) exists |= other.name == word;
      if (exists || (key.name.size() < 2 && distance > 1)) continue;
      int line = 0;
      const std::string report = report_of(file_with(key, word + " = " + key.good, &line));
      ++cases;
      EXPECT_TRUE(has(report, "f.toml:" + std::to_string(line) + ":1")) << word << "\n" << report;
      EXPECT_TRUE(has(report, "unknown key `" + word + "` in [" + key.table + "]")) << report;
      const bool good = has(report, "did you mean `" + key.name + "`?");
      right += good;
      if (!good) wrong += " " + key.table + "." + word;
    }
  }
  EXPECT_GE(cases, 2000);
  EXPECT_GE(right, cases * 95 / 100) << right << " of " << cases << ":" << wrong;
  RecordProperty("typos", cases);
  RecordProperty("right", right);
  std::printf("%d typos, %d right suggestions (%.2f %%)\n", cases, right, 100.0 * right / cases);
}

// A value, and whether a key of each kind must refuse it.
bool accepts(const KeyCase& key, const std::string& value) {
  const bool text = value.starts_with('"');
  const bool whole = !text && value.find_first_not_of("-0123456789") == std::string::npos;
  switch (key.kind) {
    case Kind::kText:
      return text && !(key.info.required && value == "\"\"");
    case Kind::kTexts:
      return (text && value != "\"\"") || value == "[\"a\"]";
    case Kind::kTokens:
      return value == "[\"a\"]" || value == "[1]";
    case Kind::kFlag:
      return value == "true";
    case Kind::kPairs:
      return value == "{ a = 1 }";
    case Kind::kInteger:
    case Kind::kInterval:
      return whole && value[0] != '-' && value.size() < 15;
    case Kind::kNumber:
      return !text && (whole || value.ends_with("0.5")) && value.size() < 15 &&
             (value[0] != '-' || key.info.range.low <= std::stod(value));
    default:
      return false;
  }
}

TEST(ConfigGenerated, EveryWrongValueIsRefusedAtItsPlaceWithWhatIsExpected) {
  const char* const values[] = {"true",   "\"\"", "nan",        "inf",        "-inf",
                                "-1",     "-0.5", "1979-05-27", "{ a = 1 }",  "[[1]]",
                                "[true]", "[]",   "[\"\"]",     "[nan, nan]", "\"a\\tb\""};
  for (const KeyCase& key : all_keys()) {
    for (const std::string value : values) {
      if (accepts(key, value)) continue;
      const bool any_list = key.kind == Kind::kTexts || key.kind == Kind::kChoices ||
                            key.kind == Kind::kGroups || key.kind == Kind::kTokens ||
                            (key.kind == Kind::kNumbers && key.info.range.count == 0);
      if (any_list && value == "[]" && !key.info.required) continue;
      int line = 0;
      const std::string report = report_of(file_with(key, key.name + "   = " + value, &line));
      const std::string place = "f.toml:" + std::to_string(line) + ":" + std::to_string(key.name.size() + 6);
      EXPECT_TRUE(has(report, place)) << key.table << "." << key.name << " = " << value << "\n" << report;
      EXPECT_TRUE(has(report, "`" + key.table + "." + key.name + "`: expected ")) << report;
    }
  }
}

TEST(ConfigGenerated, ANumberThatDoesNotFitTheMachineIsRefusedAtItsPlace) {
  for (const KeyCase& key : all_keys()) {
    for (const std::string number : {"9223372036854775808", "-9223372036854775809", "1e999"}) {
      for (const std::string before : {"", "[0.5, "}) {
        int line = 0;
        const std::string value = before + number + (before.empty() ? "" : "]");
        const std::string report = report_of(file_with(key, key.name + "   = " + value, &line));
        EXPECT_TRUE(has(report, "the number " + number +
                                    " does not fit 64 bits at f.toml:" + std::to_string(line) + ":" +
                                    std::to_string(key.name.size() + 6 + before.size())))
            << report;
      }
    }
  }
}

TEST(ConfigGenerated, AStringWhereANumberIsAskedIsRefusedAndViceVersa) {
  for (const KeyCase& key : all_keys()) {
    const bool words = key.kind == Kind::kText || key.kind == Kind::kTexts;
    int line = 0;
    const std::string report = report_of(file_with(key, key.name + " = " + (words ? "17" : "\"17\""), &line));
    EXPECT_TRUE(has(report, "f.toml:" + std::to_string(line) + ":" + std::to_string(key.name.size() + 4)))
        << key.name << "\n"
        << report;
  }
}

TEST(ConfigGenerated, ValuesJustOutsideEachRangeAreRefusedAndJustInsideAccepted) {
  for (const KeyCase& key : all_keys()) {
    const Range& range = key.info.range;
    const bool whole = key.kind == Kind::kInteger || key.kind == Kind::kSize;
    if (!whole && key.kind != Kind::kNumber) continue;
    const auto spell = [&](double v) {
      if (key.kind == Kind::kSize) return quote(exact_bytes(static_cast<int64_t>(v)));
      return whole ? std::to_string(static_cast<int64_t>(v)) : number_text(v);
    };
    const auto refused = [&](const std::string& value) {
      int line = 0;
      return has(report_of(file_with(key, key.name + " = " + value, &line)), "`: expected");
    };
    if (std::isfinite(range.low)) {
      const double below = whole ? range.low - 1 : std::nextafter(range.low, -1e308);
      EXPECT_TRUE(refused(spell(range.low_open ? range.low : below))) << key.name;
      EXPECT_FALSE(refused(spell(range.low_open ? std::nextafter(range.low, 1e308) : range.low))) << key.name;
    }
    if (std::isfinite(range.high)) {
      const double above = whole ? range.high + 1 : std::nextafter(range.high, 1e308);
      EXPECT_TRUE(refused(spell(range.high_open ? range.high : above))) << key.name;
      EXPECT_FALSE(refused(spell(range.high_open ? std::nextafter(range.high, -1e308) : range.high)))
          << key.name;
    }
  }
}

TEST(ConfigGenerated, EveryDuplicateIsReportedWithItsFirstLine) {
  for (const KeyCase& key : all_keys()) {
    int line = 0;
    const std::string twice = key.name + " = " + key.good;
    const std::string report = report_of(file_with(key, twice + "\n  " + twice, &line));
    EXPECT_TRUE(has(report, "key `" + key.name + "` of [" + key.table + "] is given twice; first in line " +
                                std::to_string(line) + " at f.toml:" + std::to_string(line + 1) + ":3"))
        << report;
  }
}

TEST(ConfigGenerated, AKeyInAnotherTableIsToldWhereItBelongs) {
  const std::vector<KeyCase> keys = all_keys();
  for (const KeyCase& key : keys) {
    for (const char* table : {"run", "model", "data", "train", "optimizer", "lora", "log"}) {
      const bool exists = std::any_of(keys.begin(), keys.end(), [&](const KeyCase& other) {
        return other.table == table && other.name == key.name;
      });
      if (exists) continue;
      KeyCase place = key;
      std::string text;
      for (const KeyCase& other : keys) {
        if (other.info.required && other.table != table)
          text += other.table + "." + other.name + " = " + other.good + "\n";
      }
      text += "[" + std::string(table) + "]\n";
      for (const KeyCase& other : keys) {
        if (other.info.required && other.table == table) text += other.name + " = " + other.good + "\n";
      }
      const int line = static_cast<int>(std::count(text.begin(), text.end(), '\n')) + 1;
      const std::string report = report_of(text + key.name + " = " + key.good + "\n");
      EXPECT_TRUE(has(report, "f.toml:" + std::to_string(line) + ":1")) << report;
      EXPECT_TRUE(has(report, "[" + key.table + "]")) << report;
      EXPECT_TRUE(has(report, "it belongs to [")) << report;
    }
  }
}

TEST(ConfigGenerated, EveryDefaultIsAcceptedAlone) {
  for (const KeyCase& key : all_keys()) {
    int line = 0;
    EXPECT_EQ(report_of(file_with(key, key.name + " = " + key.good, &line)), "");
    if (!key.optional) continue;
    EXPECT_EQ(report_of(file_with(key, key.name + " = \"auto\"", &line)), "");
  }
}

}  // namespace
}  // namespace lm
