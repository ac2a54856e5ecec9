#include "data/piece_checks.h"

#include <fmt/format.h>
#include <cstdio>

#include "base/error.h"
#include "base/log.h"

namespace lm {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& place, const std::string& next) {
  throw Error(Exit::kInput, {.area = "DATA-24", .what = what, .place = place, .next = next});
}

std::string percent(int64_t part, int64_t whole) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
  return text;
}

}  // namespace

// No target at all is an error; very few only a warning, since they may be intended (one-word answers to long
// documents).
void check_targets(const std::string& place, const PieceCounts& counts) {
  if (counts.examples == 0)
    refuse("there is no training example", place, "look at data.train and data.eval_fraction");
  if (counts.targets == 0) {
    refuse(fmt::format("not one token is a training target in {} examples ({} without a target, {} longer "
                       "than data.max_length)",
                       counts.examples, counts.without_target, counts.too_long),
           place, "check the format of the data, data.loss_on, data.max_length and data.too_long");
  }
}

void warn_of_losses(const std::string& place, const PieceCounts& counts, int64_t max_length) {
  if (counts.targets * 100 < counts.tokens) {
    log_warning("DATA-24", "only " + percent(counts.targets, counts.tokens) + " of the tokens in " + place +
                               " are training targets; check the format of the data and data.loss_on");
  }
  if (counts.endless > 0) {
    log_warning("DATA-24",
                fmt::format("{} of {} examples in {} are cut at data.max_length {} before their last answer "
                            "ends, and lose {} trained tokens: from these the model does not learn to stop; "
                            "raise data.max_length, or leave them out with data.too_long = \"drop\"",
                            counts.endless, counts.examples, place, max_length, counts.lost_targets));
  }
}

}  // namespace lm
